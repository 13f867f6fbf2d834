"""Every metric against a dense matrix built by brute force."""

import jax
import jax.numpy as jnp
import natgrad as ng
import numpy as np
import pytest
from helpers import assert_close, flat, ravel
from jax.flatten_util import ravel_pytree
from models import MODELS, WITH_LOSS

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


def check_against(metric, matrix, rtol=1e-10):
    """All methods of a metric, compiled together, against a dense matrix."""
    scale = float(jnp.max(jnp.abs(matrix)))
    v = ravel_pytree(metric._zeros())[1](jnp.sin(1.0 + jnp.arange(matrix.shape[0]).astype(matrix.dtype)))

    @jax.jit
    def everything(metric, v):
        return metric.mv(v), metric.as_matrix(), metric.diagonal(), metric.trace(), metric.inner(v, v), metric.norm(v)

    product, dense, diagonal, trace, inner, norm = everything(metric, v)
    assert jax.tree.structure(product) == jax.tree.structure(v)
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * scale)
    close(dense, matrix)
    close(flat(product), matrix @ flat(v))
    close(flat(diagonal), jnp.diagonal(matrix))
    close(trace, jnp.trace(matrix))
    close(inner, flat(v) @ matrix @ flat(v))
    close(norm, jnp.sqrt(jnp.maximum(flat(v) @ matrix @ flat(v), 0.0)))


@models
@pytest.mark.compat
def test_pullback(name):
    case = MODELS[name]()
    metric = ng.pullback(case.model, case.geometry, case.params, case.x)
    check_against(metric, jax.jit(lambda: brute_pullback(case))())


@models
def test_root_squares_to_the_metric(name):
    case = MODELS[name]()
    metric = ng.pullback(case.model, case.geometry, case.params, case.x)
    size = metric.in_size()
    unravel = ravel_pytree(case.params)[1]
    push = jax.vmap(lambda v: metric.root_mv(unravel(v)))
    pull = jax.vmap(lambda u: ravel(metric.root_transpose_mv(u)))
    columns, rows = jax.jit(lambda: (push(jnp.eye(size)), pull(jnp.eye(metric.root_size))))()
    assert_close(columns.T, rows, 1e-10)
    assert_close(rows.T @ rows, jax.jit(lambda: brute_pullback(case))(), 1e-9, 1e-11)


@with_loss
def test_gauss_newton_is_the_pullback_of_the_hessian_of_the_loss(name):
    case = MODELS[name]()
    metric = ng.gauss_newton(case.model, case.loss, case.params, case.x, case.y)
    check_against(metric, jax.jit(lambda: brute_pullback(case))(), 1e-9)


@with_loss
def test_empirical_fisher_is_the_covariance_plus_the_square_of_the_mean(name):
    """Erratum E15: the second moment of gradients is not their covariance. Divisor N in both."""
    case = MODELS[name]()
    gradients = np.asarray(jax.jit(lambda: example_gradients(case))())
    arguments = (case.model, case.loss, case.params, case.x, case.y)
    check_against(ng.empirical_fisher(*arguments), gradients.T @ gradients / len(gradients))
    check_against(ng.gradient_covariance(*arguments), np.cov(gradients.T, bias=True))


@with_loss
def test_hessian(name):
    case = MODELS[name]()
    cost = mean_loss(case)
    vector, unravel = ravel_pytree(case.params)
    dense = jax.jit(jax.hessian(lambda v: cost(unravel(v), case.x, case.y)))(vector)
    metric = ng.hessian(cost, case.params, case.x, case.y)
    check_against(metric, dense, 1e-9)
    assert not metric.is_semidefinite


@with_loss
def test_hessian_is_the_fisher_plus_a_residual_term(name):
    """The residual term weighs the curvature of each output by the slope of the loss there."""
    case = MODELS[name]()
    vector, unravel = ravel_pytree(case.params)

    @jax.jit
    def sides():
        outputs = lambda v: jax.vmap(ravel)(case.model(unravel(v), case.x))
        slopes = jax.vmap(ravel)(jax.vmap(jax.grad(case.loss))(case.model(case.params, case.x), case.y))
        residual = jnp.einsum("no,nopq->pq", slopes, jax.hessian(outputs)(vector)) / len(slopes)
        return residual + brute_pullback(case), jax.hessian(lambda v: mean_loss(case)(unravel(v), case.x, case.y))(vector)

    assert_close(*sides(), 1e-9, 1e-11)


@pytest.mark.float32
@models
def test_float32(name):
    case = MODELS[name]()
    metric = ng.pullback(case.model, case.geometry, case.params, case.x)
    assert metric.as_matrix().dtype == jnp.float32
    with jax.enable_x64(True):
        wide = MODELS[name]()
        double = lambda tree: jax.tree.map(
            lambda leaf: jnp.asarray(leaf, jnp.float64) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree
        )
        # The same numbers, not the same seeds: normal draws differ between precisions.
        wide = wide._replace(params=double(case.params), x=double(case.x))
        matrix = np.asarray(jax.jit(lambda: brute_pullback(wide))())
    check_against(metric, jnp.asarray(matrix, jnp.float32), 3e-5)


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


def test_model_without_data():
    """The Rosenbrock function as a map to outputs: one example, no batch axis."""
    outputs = lambda w: jnp.stack([1 - w[0], 10 * (w[1] - w[0] ** 2)])
    w = jnp.array([0.3, -0.5])
    J = jax.jacobian(outputs)(w)
    check_against(ng.pullback(outputs, ng.Euclidean(), w), J.T @ J)


def test_centred_pullback_subtracts_the_mean_jacobian():
    case = MODELS["least_squares"]()
    J = jax.jit(lambda: jacobians(case))()
    centred = J - J.mean(0, keepdims=True)
    matrix = jnp.einsum("nop,noq->pq", centred, centred) / len(J)
    metric = ng.pullback(case.model, ng.Euclidean(), case.params, case.x, centred=True)
    check_against(metric, matrix)
    rows = metric._root_rows()
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
    matrix = jax.jit(lambda: brute_pullback(case._replace(model=plain, params=params)))()
    check_against(ng.pullback(custom, ng.Euclidean(), params, case.x), matrix)


def test_mixed_parameter_dtypes():
    case = MODELS["least_squares"]()
    mixed = {**case.params, "w": case.params["w"].astype(jnp.float32)}
    model = lambda params, x: case.model({**params, "w": params["w"].astype(jnp.float64)}, x)
    metric = ng.pullback(model, ng.Euclidean(), mixed, case.x)
    product = metric.mv(mixed)
    assert jax.tree.map(lambda leaf: leaf.dtype, product) == jax.tree.map(lambda leaf: leaf.dtype, mixed)
    assert metric.as_matrix().dtype == jnp.float64
    gradient = jax.tree.map(jnp.ones_like, mixed)
    solution = ng.solve(metric, gradient, damping=0.1, solver=ng.CG(rtol=1e-5))
    assert solution.result == ng.RESULTS.successful
