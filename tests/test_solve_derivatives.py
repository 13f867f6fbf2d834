"""Solutions differentiate like the equation that they solve, in either direction and with any solver."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from helpers import assert_close, ravel
from models import normal

import natgrad as ng

DAMPING = 0.1

SOLVERS = {
    "cg": lambda: ng.CG(rtol=1e-13),
    "warm_cg": lambda: ng.CG(rtol=1e-13, initial=small()[1]),
    "cholesky": ng.Cholesky,
    "pseudo_inverse": ng.PseudoInverse,
    "sample_space": ng.SampleSpace,
    "auto": ng.Auto,
    "lineax_cholesky": lx.Cholesky,
    "lineax_cg": lambda: lx.CG(rtol=1e-13, atol=1e-13),
    "lineax_lu": lx.LU,
    "lineax_svd": lx.SVD,
}


def small():
    """A model with more parameters than rows, its parameters and inputs."""
    return lambda params, x: jnp.tanh(x @ params["w"]), {"w": normal(1, 3, 2)}, normal(2, 2, 3)


def wave(tree, phase):
    """A tree like the given one that is not special in any way."""
    return jax.tree.map(lambda leaf: jnp.sin(phase + jnp.arange(leaf.size, dtype=float)).reshape(leaf.shape), tree)


def move(tree, length, direction):
    return jax.tree.map(lambda leaf, d: leaf + length * d, tree, direction)


def check_derivatives(function, count, tolerance=1e-6):
    """Forward and reverse derivatives of a number in `count` others, at zero, against central differences."""
    step = 1e-5

    @jax.jit
    def derivatives():
        zero, steps = jnp.zeros(count), step * jnp.eye(count)
        values = jax.lax.map(function, jnp.concatenate([steps, -steps]))
        return jax.jacfwd(function)(zero), jax.grad(function)(zero), (values[:count] - values[count:]) / (2 * step)

    forward, reverse, expected = derivatives()
    assert np.all(np.abs(expected) > 1e-3)  # otherwise this would show nothing
    assert_close(forward, expected, tolerance)
    assert_close(reverse, expected, tolerance)


@pytest.mark.compat
@pytest.mark.sample(6)
@pytest.mark.parametrize("key", SOLVERS)
def test_natural_gradients_in_parameters_covector_and_damping(key):
    solver, (model, start, x) = SOLVERS[key](), small()

    def function(t):
        params, gradient = move(start, t[0], wave(start, 1.0)), move(wave(start, 2.0), t[1], wave(start, 3.0))
        step = ng.natural_gradient(model, ng.Euclidean(), params, x, gradient, damping=DAMPING + t[2], solver=solver)
        return ravel(step) @ ravel(wave(start, 4.0))

    check_derivatives(function, 3)


@pytest.mark.parametrize("solver", [ng.PseudoInverse(), lx.SVD()], ids=["pseudo_inverse", "lineax_svd"])
def test_pseudo_inverses_of_metrics_without_full_rank(solver):
    """On a product of two weights, whose rank stays the same nearby, with a covector outside of the range."""
    params, x = {"u": normal(1, 3), "v": normal(2, 2)}, normal(3, 4, 3)
    model = lambda params, x: x @ (params["u"][:, None] * params["v"][None, :])

    def function(t):
        metric = ng.pullback(model, ng.Euclidean(), move(params, t[0], wave(params, 1.0)), x)
        covector = move(wave(params, 2.0), t[1], wave(params, 3.0))
        return ravel(ng.solve(metric, covector, solver=solver).value) @ ravel(wave(params, 4.0))

    check_derivatives(function, 2)


@pytest.mark.parametrize("build", [ng.diagonal, ng.kfac])
def test_diagonals_and_blocks(build):
    model, start, x = small()

    def function(t):
        metric = build(model, ng.Euclidean(), move(start, t[0], wave(start, 1.0)), x)
        covector = move(wave(start, 2.0), t[1], wave(start, 3.0))
        return ravel(ng.solve(metric, covector, damping=DAMPING + t[2]).value) @ ravel(wave(start, 4.0))

    check_derivatives(function, 3)


@pytest.mark.parametrize("key", ["cg", "sample_space"])
def test_arrays_that_a_loss_or_a_preconditioner_closes_over(key):
    model, params, x = small()

    def function(t):
        loss = lambda z, y: jnp.sum(jnp.cosh((1 + t[0]) * z))
        metric = ng.gauss_newton(model, loss, params, x, x)
        solver = ng.SampleSpace()
        if key == "cg":
            solver = ng.CG(rtol=1e-13, preconditioner=lambda v: jax.tree.map(lambda leaf: leaf * (2 + t[0]), v))
        solution = ng.solve(metric, wave(params, 1.0), damping=DAMPING, solver=solver)
        return ravel(solution.value) @ ravel(wave(params, 2.0))

    check_derivatives(function, 1)


@pytest.mark.compat
@pytest.mark.parametrize("key", ["cg", "lineax_cholesky"])
def test_a_step_of_the_optimiser(key):
    model, start, x = small()
    y = normal(3, 2, 2)
    opt = ng.NaturalGradient(
        model, ng.LeastSquares(), ng.Exact(SOLVERS[key]()), ng.ConstantDamping(DAMPING), step=ng.ConstantStep(0.5)
    )
    state = opt.init(start, (x, y))

    def function(t):
        batch = x + t[1] * wave(x, 2.0), y
        params, _, _ = opt.step(move(start, t[0], wave(start, 1.0)), state, batch, jax.random.key(0))
        return ravel(params) @ ravel(wave(start, 3.0))

    check_derivatives(function, 2)


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_truncated_solve_has_truncated_derivatives(is_warm):
    """The derivative in the covector is the solution for its change, by as many steps and from zero."""
    model, params, x = small()
    covector, change = wave(params, 1.0), wave(params, 2.0)

    @jax.jit
    def answers():
        metric = ng.pullback(model, ng.Euclidean(), params, x)
        initial = wave(params, 3.0) if is_warm else None
        solve = lambda covector, initial: ng.solve(
            metric, covector, damping=DAMPING, solver=ng.CG(max_steps=2, initial=initial)
        )
        _, tangent = jax.jvp(lambda covector: solve(covector, initial).value, (covector,), (change,))
        return solve(covector, initial), tangent, solve(change, None)

    solution, tangent, expected = answers()
    assert solution.result == expected.result == ng.RESULTS.max_steps_reached
    assert_close(tangent, expected.value, 1e-9)
    assert solution.stats["num_steps"] == 2


def test_derivatives_of_a_failed_solve_raise():
    model, params, x = small()
    metric = ng.pullback(model, ng.Euclidean(), params, x)
    value = lambda damping: ravel(ng.solve(metric, wave(params, 1.0), damping=damping, solver=ng.Cholesky()).value)[0]
    assert np.isnan(jax.jit(value)(jnp.array(-1.0)))
    with pytest.raises(Exception, match="non-finite"):
        jax.jit(jax.grad(value))(jnp.array(-1.0)).block_until_ready()


def test_the_cost_of_conjugate_gradients():
    """Products: one in the loop and one for the residual, and one more where it starts from somewhere else."""
    size = 17
    root, b = normal(1, size, size), normal(2, size)

    def products(**options):
        def step(root, b):
            operator = lx.MatrixLinearOperator(root @ root.T, lx.positive_semidefinite_tag)
            return ng.solve(operator, b, damping=DAMPING, solver=ng.CG(**options))

        lowered = jax.jit(step).lower(root, b).as_text()
        return sum(f"tensor<{size}x{size}xf64>, tensor<{size}xf64>" in line for line in lowered.splitlines())

    assert products() == 2
    assert products(initial=b) == 3


@pytest.mark.compat
def test_solvers_of_lineax_report_in_our_words():
    model, params, x = small()
    covector = wave(params, 1.0)

    def answers(x):
        metric = ng.pullback(model, ng.Euclidean(), params, x)
        solve = lambda solver, **options: ng.solve(metric, covector, solver=solver, **options)
        return (
            solve(lx.LU(), damping=DAMPING),
            solve(lx.Cholesky()),
            solve(lx.CG(rtol=1e-12, atol=0.0, max_steps=2), damping=DAMPING),
            solve(lx.SVD()),
        )

    for solved, singular, truncated, lowest in (answers(x), jax.jit(answers)(x)):
        assert solved.result == ng.RESULTS.successful and solved.solver == "LU"
        # Four rows for six parameters, and no damping.
        assert singular.result in (ng.RESULTS.not_positive_definite, ng.RESULTS.inaccurate)
        assert truncated.result == ng.RESULTS.max_steps_reached and truncated.stats["num_steps"] == 2
        assert lowest.result == ng.RESULTS.successful and lowest.stats["rank"] == 4
        assert lowest.stats["residual"] > 1e-2


def test_a_damped_metric_is_its_matrix():
    model, params, x = small()
    metric = ng.pullback(model, ng.Euclidean(), params, x)
    damped, v = ng.DampedMetric(metric, DAMPING), normal(3, 6)
    matrix = metric.as_matrix() + DAMPING * jnp.eye(6)
    assert_close(damped.as_matrix(), matrix, 1e-12)
    assert_close(damped.mv(v), matrix @ v, 1e-12)
    assert_close(damped.diagonal(), jnp.diagonal(matrix), 1e-12)
    assert_close(ravel(damped.unflatten(v)), v)
    for solver in (ng.CG(rtol=1e-13), ng.Cholesky(), ng.PseudoInverse(), ng.SampleSpace(), ng.Auto(), lx.Cholesky()):
        assert_close(lx.linear_solve(damped, v, solver).value, jnp.linalg.solve(matrix, v), 1e-9)


def test_a_solver_has_to_be_one():
    _, params, _ = small()
    with pytest.raises(TypeError, match=r"`solve` needs a solver of natgrad or lineax.*Pass an instance"):
        ng.solve(ng.identity(params), params, solver=ng.CG)  # pyright: ignore[reportArgumentType]
