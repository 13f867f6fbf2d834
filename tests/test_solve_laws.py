"""Solvers agree with dense algebra and with each other, and say what happened."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, flat, ravel
from models import MODELS, WITH_LOSS, normal

import natgrad as ng

DAMPING = 1e-2

SOLVERS = {
    "cg": lambda: ng.CG(rtol=1e-12),
    "cholesky": ng.Cholesky,
    "pseudo_inverse": ng.PseudoInverse,
    "sample_space": ng.SampleSpace,
    "auto": ng.Auto,
}


def gradient_of(case):
    return jax.grad(lambda params: jnp.mean(jax.vmap(case.loss)(case.model(params, case.x), case.y)))(case.params)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", WITH_LOSS)
@pytest.mark.compat
def test_all_solvers_agree_with_dense_algebra(name):
    case = MODELS[name]()

    @jax.jit
    def answers():
        metric = ng.pullback(case.model, case.geometry, case.params, case.x)
        gradient = gradient_of(case)
        solutions = {key: ng.solve(metric, gradient, damping=DAMPING, solver=s()) for key, s in SOLVERS.items()}
        return metric.as_matrix(), gradient, solutions

    matrix, gradient, solutions = answers()
    expected = np.linalg.solve(matrix + DAMPING * np.eye(len(matrix)), flat(gradient))
    for key, solution in solutions.items():
        assert solution.result == ng.RESULTS.successful, key
        assert_close(flat(solution.value), expected, 1e-8, 1e-9 * np.abs(expected).max())
        assert solution.stats["residual"] < 1e-9
    direct = {key: flat(solutions[key].value) for key in ("sample_space", "cholesky")}
    assert_close(direct["sample_space"], direct["cholesky"], 1e-9, 1e-9 * np.abs(expected).max())


def test_natural_gradient_is_one_call():
    case = MODELS["dense"]()
    gradient = jax.jit(lambda: gradient_of(case))()
    metric = ng.pullback(case.model, case.geometry, case.params, case.x)
    step = ng.natural_gradient(case.model, case.geometry, case.params, case.x, gradient, damping=DAMPING)
    assert_close(step, ng.solve(metric, gradient, damping=DAMPING, solver=ng.Cholesky()).value, 1e-8)
    compiled = jax.jit(lambda p: ng.natural_gradient(case.model, case.geometry, p, case.x, gradient, damping=DAMPING))
    assert_close(compiled(case.params), step, 1e-8)
    assert flat(step) @ flat(gradient) > 0  # against it the cost falls


@pytest.mark.parametrize("rtol", [None, 1e-6])
def test_pseudo_inverse_is_that_of_numpy(rtol):
    """On a model with redundant parameters: a product of two weights."""
    params = {"u": normal(1, 3), "v": normal(2, 2)}
    model = lambda params, x: x @ (params["u"][:, None] * params["v"][None, :])
    metric = ng.pullback(model, ng.Euclidean(), params, normal(3, 4, 3))
    covector = metric.mv(jax.tree.map(lambda leaf: leaf + 1.0, params))
    solution = ng.solve(metric, covector, solver=ng.PseudoInverse(rtol=rtol))
    matrix = np.asarray(metric.as_matrix())
    assert_close(flat(solution.value), np.linalg.pinv(matrix, hermitian=True) @ flat(covector), 1e-9, 1e-11)
    assert solution.stats["rank"] == np.linalg.matrix_rank(matrix) == 4
    # The covector is in the range, so the equation is met, by the solution of least norm.
    assert solution.stats["residual"] < 1e-10
    assert abs(flat(solution.value) @ flat(ng.null_space(metric)).reshape(1, -1)[0]) < 1e-9
    outside = jax.tree.map(lambda leaf: leaf[0], ng.null_space(metric))
    assert abs(ng.solve(metric, outside, solver=ng.PseudoInverse()).stats["residual"] - 1) < 1e-9


def test_sample_space_keeps_its_digits_with_cotangents():
    """With as many parameters as rows or more, so that every residual can be reached."""
    case = MODELS["dense"]()

    @jax.jit
    def answers(damping):
        metric = ng.pullback(case.model, case.geometry, case.params, case.x)
        cotangents = jax.vmap(jax.grad(case.loss))(case.model(case.params, case.x), case.y)
        gradient = gradient_of(case)
        plain = ng.solve(metric, gradient, damping=damping, solver=ng.SampleSpace())
        exact = ng.solve(metric, gradient, damping=damping, solver=ng.SampleSpace(cotangents=cotangents))
        return plain, exact

    for damping in (1e-6, 1e-10):
        plain, exact = answers(damping)
        assert plain.result == exact.result == ng.RESULTS.successful
    plain, exact = answers(1e-14)
    # Nearly equal vectors were subtracted, and the outcome says so.
    assert plain.result != ng.RESULTS.successful
    assert exact.stats["residual"] < 1e-2 * plain.stats["residual"]


def test_softmax_coordinates_are_the_scaled_residuals():
    """For softmax outputs they are (p - t) / sqrt(p), up to the average over examples."""
    case = MODELS["dense"]()
    metric = ng.pullback(case.model, case.geometry, case.params, case.x)
    z = case.model(case.params, case.x)
    p = jax.nn.softmax(z, axis=-1)
    residual = p - jax.nn.one_hot(case.y, 3)
    expected = residual / jnp.sqrt(p) / np.sqrt(len(z))
    assert_close(metric.root_coordinates(residual), expected.T.reshape(-1), 1e-8)


def test_conjugate_gradients_start_warm_stop_early_and_use_a_preconditioner():
    case = MODELS["dense"]()

    @jax.jit
    def answers():
        metric = ng.pullback(case.model, case.geometry, case.params, case.x)
        gradient = gradient_of(case)
        solve = lambda **options: ng.solve(metric, gradient, damping=DAMPING, solver=ng.CG(**options))
        exact = ng.solve(metric, gradient, damping=DAMPING, solver=ng.Cholesky()).value
        inverse = lambda covector: ng.solve(metric, covector, damping=DAMPING, solver=ng.Cholesky()).value
        return solve(), solve(initial=exact), solve(max_steps=2), solve(preconditioner=inverse)

    plain, warm, short, helped = answers()
    assert plain.stats["num_steps"] > 4
    assert warm.stats["num_steps"] == 0
    assert helped.stats["num_steps"] <= 2
    assert short.stats["num_steps"] == 2
    assert short.result == ng.RESULTS.max_steps_reached
    assert short.stats["residual"] > plain.stats["residual"]


def test_outcomes_explain_themselves():
    case = MODELS["dense"]()
    gradient = jax.jit(lambda: gradient_of(case))()
    cost = lambda params: -jnp.sum(flat_square(params))
    for solver in (ng.CG(), ng.Cholesky(), ng.PseudoInverse()):
        solution = ng.solve(ng.hessian(cost, case.params), gradient, solver=solver)
        assert solution.result == ng.RESULTS.not_positive_definite
        assert "negative curvature" in ng.RESULTS[solution.result]
    bad = jax.tree.map(lambda leaf: leaf.at[0].set(jnp.nan), gradient)
    metric = ng.pullback(case.model, case.geometry, case.params, case.x)
    for solver in (ng.Cholesky(), ng.PseudoInverse(), ng.SampleSpace()):
        result = ng.solve(metric, bad, damping=DAMPING, solver=solver).result
        assert result == ng.RESULTS.not_finite, solver
        assert "NaN" in ng.RESULTS[result]


def flat_square(tree):
    return jnp.stack([jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize(
    ("dense", "damping", "words"),
    [
        (2000, 1e-3, "SampleSpace, because 15 samples are fewer than 28 parameters"),
        (2000, 0.0, "PseudoInverse, because 28 parameters fit a dense matrix, and there is no damping"),
        (10, 1e-3, "CG, because 28 parameters are too many"),
    ],
)
def test_auto_says_what_it_picked(dense, damping, words):
    case = MODELS["dense"]()
    params = {**case.params, "v": jnp.concatenate([case.params["v"], normal(8, 0, 3)])}
    metric = ng.pullback(case.model, case.geometry, params, case.x)
    covector = jax.tree.map(jnp.ones_like, params)
    solve = lambda metric: ng.solve(metric, covector, damping=damping, solver=ng.Auto(dense=dense))
    assert words in solve(metric).solver
    assert words in jax.eval_shape(solve, metric).solver  # and no differently while it is compiled


def test_no_parameter_by_parameter_array_in_sample_space():
    """No intermediate of the compiled solve has anywhere near P x P entries."""
    params = {"w": normal(1, 200, 50), "v": normal(2, 50, 2)}
    x, y = normal(3, 6, 200), normal(4, 6, 2)
    model = lambda params, x: jnp.tanh(x @ params["w"]) @ params["v"]

    def step(params):
        gradient = jax.grad(lambda p: jnp.mean(jnp.sum((model(p, x) - y) ** 2, axis=-1)))(params)
        return ng.natural_gradient(model, ng.Euclidean(), params, x, gradient, damping=1e-3, solver=ng.SampleSpace())

    compiled = jax.jit(step).lower(params).compile()
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    rows = 12
    assert compiled.memory_analysis().temp_size_in_bytes < 40 * rows * size * 8


@pytest.mark.sample(4)
@pytest.mark.float32
@pytest.mark.parametrize("key", SOLVERS)
def test_float32(key):
    case = MODELS["dense"]()
    solver = ng.CG(rtol=1e-5) if key == "cg" else SOLVERS[key]()

    @jax.jit
    def answer():
        metric = ng.pullback(case.model, case.geometry, case.params, case.x)
        return metric.as_matrix(), gradient_of(case), ng.solve(metric, gradient_of(case), damping=0.1, solver=solver)

    matrix, gradient, solution = answer()
    expected = np.linalg.solve(np.asarray(matrix, float) + 0.1 * np.eye(len(matrix)), flat(gradient))
    assert solution.result == ng.RESULTS.successful
    np.testing.assert_allclose(ravel(solution.value), expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
