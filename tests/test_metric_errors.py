"""What metrics and solvers refuse, and in which words."""

import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
import pytest
from models import MODELS, normal

import natgrad as ng

X = np.ones((4, 3))
W = np.ones((3, 2))
linear = lambda w, x: x @ w
square = lambda z, y: jnp.sum(z**2)


def metric():
    return ng.pullback(linear, ng.Euclidean(), jnp.asarray(W), X)


def batch_norm(w, x):
    z = x @ w
    return (z - jnp.mean(z, axis=0, keepdims=True)) / (1 + jnp.std(z, axis=0, keepdims=True))


REFUSED = {
    "integer_parameters": (
        lambda: ng.pullback(lambda p, x: x * p["scale"], ng.Euclidean(), {"scale": jnp.arange(3)}, X),
        TypeError,
        r"`pullback` needs parameters that are real floating-point.*`params\['scale'\]` is `int",
    ),
    "complex_parameters": (lambda: ng.pullback(linear, ng.Euclidean(), 1j * W, X), TypeError, "complex"),
    "python_parameters": (lambda: ng.pullback(lambda p, x: p * x, ng.Euclidean(), 2.0, X), TypeError, "`float`"),
    "no_parameters": (lambda: ng.pullback(lambda p, x: x, ng.Euclidean(), {}, X), ValueError, "without any array"),
    "empty_batch": (lambda: ng.pullback(linear, ng.Euclidean(), W, X[:0]), ValueError, "empty batch"),
    "ragged_batch": (
        lambda: ng.pullback(lambda w, x: x[0] @ w, ng.Euclidean(), W, (X, X[:2])),
        ValueError,
        "same leading axis",
    ),
    "nan_in_data": (
        lambda: ng.pullback(linear, ng.Euclidean(), W, np.where(X > 0, np.nan, X)),
        ValueError,
        "output of the model needs finite numbers.*Look for NaN",
    ),
    "sum_over_the_batch": (
        lambda: ng.pullback(lambda w, x: jnp.sum(x @ w, axis=0), ng.Euclidean(), W, X),
        ValueError,
        r"4 examples of `x` along its leading axis.*\(2,\).*squeeze",
    ),
    "integer_outputs": (
        lambda: ng.pullback(lambda w, x: jnp.argmax(x @ w, axis=-1), ng.Euclidean(), W, X),
        TypeError,
        "output of the model must be real",
    ),
    "coupled_examples": (
        lambda: ng.pullback(batch_norm, ng.Euclidean(), jnp.asarray(W), normal(1, 4, 3)),
        ValueError,
        "couples examples.*batch normalisation.*check=False",
    ),
    "no_samples": (
        lambda: ng.pullback(linear, ng.Euclidean(), W, X, key=jax.random.key(0), num_samples=0),
        ValueError,
        "`num_samples` to be a whole number of at least 1",
    ),
    "output_outside_the_family": (
        lambda: ng.pullback(linear, ng.Fisher(ng.Exponential()), W, X),
        ValueError,
        "^`pullback`: natural parameter `z` of `Exponential` needs negative numbers",
    ),
    "concave_loss": (
        lambda: ng.gauss_newton(linear, lambda z, y: -jnp.sum(z**2), W, X),
        ValueError,
        "convex",
    ),
    "cost_with_several_values": (lambda: ng.hessian(lambda w: w, jnp.asarray(W)), TypeError, "returns one number"),
    "hessian_has_no_samples": (
        lambda: ng.hessian(lambda w: jnp.sum(w**2), jnp.asarray(W)).sample(jax.random.key(0)),
        TypeError,
        "not a covariance.*`gauss_newton`",
    ),
    "hessian_has_no_root": (
        lambda: ng.solve(ng.hessian(lambda w: jnp.sum(w**2), jnp.asarray(W)), W, damping=1.0, solver=ng.SampleSpace()),
        TypeError,
        "no sample space.*`CG`",
    ),
    "other_structure": (lambda: metric().mv({"w": W}), ValueError, r"structure and shapes of the parameters, \(3, 2\)"),
    "other_shape": (lambda: ng.solve(metric(), W.T), ValueError, r"`solve`: the covector needs.*\(2, 3\)"),
    "other_distance": (
        lambda: ng.function_distance(linear, ng.Euclidean(), W, W.T, X),
        ValueError,
        "`function_distance`: `other`",
    ),
    "negative_damping": (
        lambda: ng.solve(metric(), W, damping=-1.0),
        ValueError,
        "`damping` needs a number of at least 0",
    ),
    "vector_damping": (
        lambda: ng.solve(metric(), W, damping=np.ones(2)),
        ValueError,
        r"one number, but got shape \(2,\)",
    ),
    "undamped_sample_space": (
        lambda: ng.solve(metric(), W, solver=ng.SampleSpace()),
        ValueError,
        "`damping` above 0.*`PseudoInverse`",
    ),
    "sample_space_of_a_matrix": (
        lambda: ng.solve(lx.MatrixLinearOperator(jnp.eye(2)), np.ones(2), damping=1.0, solver=ng.SampleSpace()),
        TypeError,
        "needs a natgrad metric",
    ),
    "cotangents_of_a_sum": (
        lambda: ng.solve(metric() + metric(), W, damping=1.0, solver=ng.SampleSpace(cotangents=X)),
        TypeError,
        "metric of one model",
    ),
    "cotangents_of_another_shape": (
        lambda: ng.solve(metric(), W, damping=1.0, solver=ng.SampleSpace(cotangents=X)),
        ValueError,
        r"shapes of the outputs, \(4, 2\), but have \(4, 3\)",
    ),
    "no_steps": (lambda: ng.CG(max_steps=0), ValueError, "`max_steps` of at least 1"),
    "negative_multiple": (lambda: -1.0 * metric(), ValueError, "multiple of a metric needs a number of at least 0"),
    "vector_multiple": (lambda: metric() * np.ones(2), ValueError, r"one number, but got an array of shape \(2,\)"),
    "sum_over_other_parameters": (lambda: metric() + ng.identity(X), ValueError, "A sum of metrics needs"),
    "nothing_restricted_to": (lambda: metric().restrict(False), ValueError, "selects no parameter"),
    "one_sample": (
        lambda: ng.trace_estimate(metric(), jax.random.key(0), num_samples=1),
        ValueError,
        "at least 2 samples",
    ),
    "iterator_of_batches": (
        lambda: ng.accumulate(lambda x: metric(), iter([X])),
        TypeError,
        "got an iterator, which is empty after",
    ),
    "no_batches": (lambda: ng.accumulate(lambda x: metric(), []), ValueError, "no batches"),
    "batches_of_something_else": (lambda: ng.accumulate(lambda x: x, [X]), TypeError, "return the metric of a batch"),
    "loader_under_jit": (
        lambda: jax.jit(ng.accumulate(lambda x: metric(), [X], progress=False).mv)(W),
        TypeError,
        "cannot be traced",
    ),
    "failed_natural_gradient": (
        lambda: ng.natural_gradient(linear, ng.Euclidean(), W, X, np.full(W.shape, np.nan), damping=1.0),
        RuntimeError,
        "could not be computed. The solution is not finite",
    ),
    "failed_steps": (
        lambda: ng.check_invariance(
            ng.Task(lambda w, x: x @ w[:3] + x @ w[3:], ng.Euclidean(), square, X),
            jnp.ones(6),
            lambda theta: 2 * theta,
            jnp.full(6, 0.5),
            solver=ng.Cholesky(),
        ),
        ValueError,
        r"`check_invariance` needs steps that stay finite.*`PseudoInverse\(\)`",
    ),
    "different_points": (
        lambda: ng.check_invariance(ng.Task(linear, ng.Euclidean(), square, X), W, jnp.exp, jnp.asarray(W)),
        ValueError,
        r"`chart\(theta\)` to be `params`",
    ),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name):
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        call()


def test_coupling_passes_when_it_is_not_checked():
    coupled = ng.pullback(batch_norm, ng.Euclidean(), jnp.asarray(W), normal(1, 4, 3), check=False)
    assert np.isfinite(coupled.mv(jnp.asarray(W))).all()


def test_failed_natural_gradient_raises_under_jit():
    case = MODELS["dense"]()
    nan = jax.tree.map(lambda leaf: leaf * jnp.nan, case.params)
    step = jax.jit(lambda g: ng.natural_gradient(case.model, case.geometry, case.params, case.x, g, damping=1.0))
    with pytest.raises(RuntimeError, match="not finite"):
        jax.block_until_ready(step(nan))
