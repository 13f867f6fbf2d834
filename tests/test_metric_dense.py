"""Every metric against a dense matrix built by brute force."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, flat, ravel
from jax.flatten_util import ravel_pytree
from models import MODELS, WITH_LOSS

import natgrad as ng

models = pytest.mark.parametrize("name", MODELS)
with_loss = pytest.mark.parametrize("name", WITH_LOSS)


def jacobians(case):
    """The Jacobian of each example's flattened output: (N, outputs, parameters)."""
    vector, unravel = ravel_pytree(case.params)
    outputs = lambda v: jax.vmap(ravel)(case.model(unravel(v), case.x))
    return jax.jacobian(outputs)(vector)


def brute_pullback(case):
    J = jacobians(case)
    blocks = jax.vmap(case.geometry.metric_matrix)(case.model(case.params, case.x))
    return jnp.einsum("nop,noq,nqr->pr", J, blocks, J) / len(J)


def example_gradients(case):
    J = jacobians(case)
    cotangents = jax.vmap(jax.grad(case.loss))(case.model(case.params, case.x), case.y)
    return jnp.einsum("nop,no->np", J, jax.vmap(ravel)(cotangents))


def mean_loss(case):
    return lambda params, x, y: jnp.mean(jax.vmap(case.loss)(case.model(params, x), y))


def check_against(build, brute, rtol=1e-10):
    """All methods of a metric against a dense matrix; both are built and evaluated in one compiled function."""

    @jax.jit
    def everything():
        metric, matrix = build(), brute()
        v = ravel_pytree(metric._zeros())[1](jnp.sin(1.0 + jnp.arange(len(matrix), dtype=matrix.dtype)))
        answers = metric.mv(v), metric.as_matrix(), metric.diagonal(), metric.inner(v, v), metric.norm(v)
        return v, matrix, answers

    v, matrix, (product, dense, diagonal, inner, norm) = everything()
    scale = float(np.max(np.abs(matrix)))
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * scale)
    assert jax.tree.structure(product) == jax.tree.structure(v)
    close(dense, matrix)
    close(flat(product), matrix @ flat(v))
    close(flat(diagonal), np.diagonal(matrix))
    close(inner, flat(v) @ matrix @ flat(v))
    close(norm, np.sqrt(max(flat(v) @ matrix @ flat(v), 0.0)))


def pullback_of(case):
    return lambda: ng.pullback(case.model, case.geometry, case.params, case.x)


@pytest.mark.sample(2)
@models
@pytest.mark.compat
def test_pullback(name):
    case = MODELS[name]()
    check_against(pullback_of(case), lambda: brute_pullback(case))


@pytest.mark.sample(4)
@models
def test_root_squares_to_the_metric(name):
    case = MODELS[name]()
    unravel = ravel_pytree(case.params)[1]

    @jax.jit
    def sides():
        metric = pullback_of(case)()
        columns = jax.vmap(lambda v: metric.root_mv(unravel(v)))(jnp.eye(metric.in_size()))
        rows = jax.vmap(lambda u: ravel(metric.root_transpose_mv(u)))(jnp.eye(metric.root_size))
        return columns, rows, brute_pullback(case)

    columns, rows, matrix = sides()
    assert_close(columns.T, rows, 1e-10)
    assert_close(rows.T @ rows, matrix, 1e-9, 1e-11)


@pytest.mark.sample(2)
@with_loss
def test_gauss_newton_is_the_pullback_of_the_hessian_of_the_loss(name):
    case = MODELS[name]()
    build = lambda: ng.gauss_newton(case.model, case.loss, case.params, case.x, case.y)
    check_against(build, lambda: brute_pullback(case), 1e-9)


@pytest.mark.sample(1)
@with_loss
def test_empirical_fisher_is_the_covariance_plus_the_square_of_the_mean(name):
    """Erratum E15: the second moment of gradients is not their covariance. Divisor N in both."""
    case = MODELS[name]()
    arguments = (case.model, case.loss, case.params, case.x, case.y)
    second_moment = lambda g: g.T @ g / len(g)
    check_against(lambda: ng.empirical_fisher(*arguments), lambda: second_moment(example_gradients(case)))

    def covariance():
        gradients = example_gradients(case)
        return second_moment(gradients - jnp.mean(gradients, axis=0, keepdims=True))

    check_against(lambda: ng.gradient_covariance(*arguments), covariance)


@pytest.mark.sample(2)
@with_loss
def test_hessian_is_the_fisher_plus_a_residual_term(name):
    """The residual term weighs the curvature of each output by the slope of the loss there."""
    case = MODELS[name]()
    vector, unravel = ravel_pytree(case.params)

    def brute():
        outputs = lambda v: jax.vmap(ravel)(case.model(unravel(v), case.x))
        slopes = jax.vmap(ravel)(jax.vmap(jax.grad(case.loss))(case.model(case.params, case.x), case.y))
        residual = jnp.einsum("no,nopq->pq", slopes, jax.hessian(outputs)(vector)) / len(slopes)
        return residual + brute_pullback(case)

    check_against(lambda: ng.hessian(mean_loss(case), case.params, case.x, case.y), brute, 1e-9)


@pytest.mark.sample(4)
@pytest.mark.float32
@models
def test_float32(name):
    matrix = jax.jit(lambda: pullback_of(MODELS[name]())().as_matrix())()
    assert matrix.dtype == jnp.float32
    with jax.enable_x64(True):
        expected = np.asarray(jax.jit(lambda: brute_pullback(MODELS[name]()))())
    np.testing.assert_allclose(matrix, expected, rtol=3e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.sample(2)
@models
def test_hessian_of_the_function_distance_is_the_metric(name):
    case = MODELS[name]()
    vector, unravel = ravel_pytree(case.params)

    @jax.jit
    def sides():
        distance = lambda v: ng.function_distance(case.model, case.geometry, case.params, unravel(v), case.x)
        return jax.hessian(distance)(vector), brute_pullback(case), distance(vector), jax.grad(distance)(vector)

    hessian, matrix, least, slope = sides()
    assert_close(hessian, matrix, 1e-8, 1e-10)
    assert abs(least) < 1e-12
    assert_close(slope, jnp.zeros_like(slope), atol=1e-10)


def test_trace_is_the_sum_of_the_diagonal_and_eager_evaluation_agrees():
    case = MODELS["dense"]()
    metric = pullback_of(case)()
    assert_close(metric.trace(), jax.jit(lambda m: jnp.trace(m.as_matrix()))(metric), 1e-12)


def test_model_without_data():
    """The Rosenbrock function as a map to outputs: one example, no batch axis."""
    outputs = lambda w: jnp.stack([1 - w[0], 10 * (w[1] - w[0] ** 2)])
    w = jnp.array([0.3, -0.5])

    def brute():
        J = jax.jacobian(outputs)(w)
        return J.T @ J

    check_against(lambda: ng.pullback(outputs, ng.Euclidean(), w), brute)


def test_centred_pullback_subtracts_the_mean_jacobian():
    case = MODELS["least_squares"]()

    def brute():
        J = jacobians(case)
        centred = J - jnp.mean(J, axis=0, keepdims=True)
        return jnp.einsum("nop,noq->pq", centred, centred) / len(J)

    build = lambda: ng.pullback(case.model, ng.Euclidean(), case.params, case.x, centred=True)
    check_against(build, brute)
    rows, matrix = jax.jit(lambda: (build().root_rows(), brute()))()
    assert_close(rows.T @ rows, matrix, 1e-9, 1e-12)


def test_model_written_for_reverse_mode_only():
    @jax.custom_vjp
    def sine(x):
        return jnp.sin(x)

    sine.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cosine, u: (cosine * u,))
    case = MODELS["least_squares"]()
    custom = lambda params, x: sine(x @ params["w"]) @ params["v"]
    plain = lambda params, x: jnp.sin(x @ params["w"]) @ params["v"]
    params = {"w": case.params["w"], "v": case.params["v"]}
    build = lambda: ng.pullback(custom, ng.Euclidean(), params, case.x)
    check_against(build, lambda: brute_pullback(case._replace(model=plain, params=params)))


def test_mixed_parameter_dtypes():
    case = MODELS["least_squares"]()
    mixed = {**case.params, "w": case.params["w"].astype(jnp.float32)}
    model = lambda params, x: case.model({**params, "w": params["w"].astype(jnp.float64)}, x)

    @jax.jit
    def answers():
        metric = ng.pullback(model, ng.Euclidean(), mixed, case.x)
        solution = ng.solve(metric, jax.tree.map(jnp.ones_like, mixed), damping=0.1, solver=ng.CG(rtol=1e-5))
        return metric.mv(mixed), metric.as_matrix(), solution

    product, matrix, solution = answers()
    assert jax.tree.map(lambda leaf: leaf.dtype, product) == jax.tree.map(lambda leaf: leaf.dtype, mixed)
    assert matrix.dtype == jnp.float64
    assert solution.result == ng.RESULTS.successful
