r"""Laws that every geometry, family, metric, solver and part of an optimiser keeps, for tests of your own classes.

```python
from natgrad import testing


def test_my_geometry_keeps_the_laws():
    testing.check(MyGeometry(), jnp.array([0.3, -1.0]))
```
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

import natgrad as ng
from natgrad import _tree
from natgrad._check import caller, public

# Draws from which expectations are estimated.
NUM_DRAWS = 20_000
# How many standard errors an estimate may be off. With Gaussian errors and 1,000 entries about 1 false alarm in 26,000
# classes; keys are fixed, so that a test gives the same result each time.
NUM_ERRORS = 5.5
# Relative error that is allowed where both sides are computed in float64.
TOLERANCE = 1e-6


class Law(NamedTuple):
    """A tested identity: its name, and its error divided by the error that is allowed."""

    name: str
    excess: float

    @property
    def holds(self) -> bool:
        return bool(self.excess <= 1)


@public
def check(instance: Any, *at: PyTree) -> list[Law]:
    r"""Test the mathematical identities that a class must satisfy, and raise an `AssertionError` that lists the
    violated ones. Inputs are in float64; a metric in float32 is tested to three digits.

    **Arguments:**

    - `instance`: a geometry, a family, a metric, a solver, or a structure, damping rule, step rule, momentum or guard
      of `NaturalGradient`.
    - `at`: an output (geometries) or natural parameters (families); omit it for everything else.

    **Returns:** the laws that were tested.

    ```python
    import jax.numpy as jnp
    import natgrad as ng
    from natgrad import testing

    testing.check(ng.Fisher(ng.Categorical()), jnp.array([0.3, -1.0, 0.5]))
    ```
    """
    with jax.enable_x64(True):
        laws = list(_laws(instance, *jax.tree.map(_wide, at)))
    broken = [law for law in laws if not law.holds]
    if broken:
        lines = [f"- {law.name} (error {law.excess:.2g} times what is allowed)" for law in broken]
        name = type(instance).__name__
        raise AssertionError("\n".join([f"`{name}` breaks {len(broken)} of {len(laws)} laws:", *lines]))
    return laws


@functools.singledispatch
def _laws(instance: Any, *at: PyTree) -> Iterator[Law]:
    raise TypeError(
        f"{caller()} knows no laws of `{type(instance).__name__}`. It takes a geometry, a family, a metric, a solver, "
        "or a structure, damping rule, step rule, momentum or guard of `NaturalGradient`."
    )


@_laws.register
def _of_geometry(geometry: ng.AbstractGeometry, *at: PyTree) -> Iterator[Law]:
    z = _single(at, "an output, such as `jnp.array([0.3, -1.0])`")
    vector, unravel = ravel_pytree(z)
    direction = jnp.cos(jnp.arange(vector.size, dtype=vector.dtype))

    @jax.jit
    def compute(v, keys):
        here = unravel(v)
        rho = lambda u: geometry.dissimilarity(unravel(u), here)
        rows = jax.vmap(_flat)(geometry.factor(here))
        matrix = geometry.metric_matrix(here)
        return {
            "least": rho(v),
            "gradient": jax.grad(rho)(v),
            "hessian": jax.hessian(rho)(v),
            "matrix": matrix,
            "product": _flat(geometry.metric_mv(here, unravel(direction))),
            "factor": rows.T @ rows,
            "nearby": rho(v + 0.01 * matrix @ direction),
            "samples": jax.vmap(lambda key: _flat(geometry.sample(here, key)))(keys),
        }

    known = jax.tree.map(np.asarray, compute(vector, jax.random.split(jax.random.key(0), NUM_DRAWS)))
    G = known["matrix"]
    size = float(np.abs(known["hessian"]).max(initial=0.0))
    zeros = np.zeros(vector.size)
    yield _equal("the dissimilarity of an output from itself is zero", known["least"], 0.0, scale=size)
    yield _equal("the dissimilarity is stationary where outputs agree", known["gradient"], zeros, scale=size)
    yield _equal("the dissimilarity is not negative", np.minimum(known["nearby"], 0.0), 0.0, scale=size)
    yield _equal("the metric is the Hessian of the dissimilarity", G, known["hessian"])
    yield _equal("`metric_mv` multiplies by the metric", known["product"], G @ np.asarray(direction))
    yield from _semidefinite(G)
    yield _equal("columns of `factor` multiply to the metric", known["factor"], G)
    yield from _covariance("`sample`", known["samples"], G)


@_laws.register
def _of_family(family: ng.AbstractFamily, *at: PyTree) -> Iterator[Law]:
    eta = _single(at, "natural parameters, such as `jnp.array(-0.5)`")
    vector, unravel = ravel_pytree(eta)

    @jax.jit
    def compute(v, keys):
        here = unravel(v)
        xi = family.to_moments(here)
        xs = jax.vmap(lambda key: family.sample(here, key))(keys)
        log_prob = lambda x: family.log_prob(here, x)
        of_natural = jax.vmap(lambda x: jax.grad(lambda v: family.log_prob(unravel(v), x))(v))
        few = _tree.take(xs, slice(None, 8))
        return {
            "moments": _flat(xi),
            "gradient": jax.grad(lambda v: family.log_partition(unravel(v)))(v),
            "round_trip": _flat(family.to_moments(family.to_natural(xi))),
            "statistics": jax.vmap(lambda x: _flat(family.sufficient_statistics(x)))(xs),
            "log_probs": jax.vmap(log_prob)(xs),
            "entropy": family.entropy(here),
            "scores": jax.vmap(lambda x: _flat(family.score(here, x)))(few),
            "gradients": of_natural(few),
        }

    known = jax.tree.map(np.asarray, compute(vector, jax.random.split(jax.random.key(1), NUM_DRAWS)))
    yield _equal("moments are the gradient of the log partition", known["moments"], known["gradient"])
    yield _equal("`to_natural` inverts `to_moments`", known["round_trip"], known["moments"])
    yield _equal("scores are gradients of `log_prob`", known["scores"], known["gradients"])
    yield _mean("statistics of samples average to the moments", known["statistics"], known["moments"])
    yield _mean("`-log_prob` of samples averages to the entropy", -known["log_probs"], known["entropy"])
    yield from _of_geometry(ng.Fisher(family), eta)


@_laws.register
def _of_metric(metric: ng.AbstractMetric, *at: PyTree) -> Iterator[Law]:
    zeros = _tree.zeros(metric.in_structure())
    vector, unravel = ravel_pytree(zeros)
    directions = jnp.stack([jnp.cos(k + jnp.arange(vector.size, dtype=vector.dtype)) for k in (1.0, 2.0)])
    product = lambda v: _flat(metric.mv(unravel(v)))

    def compute(keys):
        known = {
            "columns": jax.lax.map(product, jnp.eye(vector.size, dtype=vector.dtype)),
            "products": jax.lax.map(product, jnp.stack([*directions, directions[0] - 2 * directions[1]])),
            "matrix": metric.as_matrix(),
            "diagonal": _flat(metric.diagonal()),
        }
        if metric.root_size is not None:
            back = lambda u: _flat(metric.root_transpose_mv(u))
            known["rows"] = jax.lax.map(back, jnp.eye(metric.root_size, dtype=vector.dtype))
            known["images"] = jax.lax.map(lambda v: metric.root_mv(unravel(v)), directions)
            known["gram"] = metric.root_gram()
            known["samples"] = jax.lax.map(lambda key: _flat(metric.sample(key)), keys, batch_size=256)
        return known

    known = jax.tree.map(np.asarray, jax.jit(compute)(jax.random.split(jax.random.key(2), NUM_DRAWS)))
    G, products = known["columns"], known["products"]
    tolerance = 1e-3 if vector.dtype == jnp.float32 else TOLERANCE
    yield _equal("products are linear", products[2], products[0] - 2 * products[1], tolerance)
    yield _equal("the metric is symmetric", G, G.T, tolerance)
    yield _equal("`as_matrix` has the products for its columns", known["matrix"], G, tolerance)
    yield _equal("`diagonal` is the diagonal of the matrix", known["diagonal"], np.diag(G), tolerance)
    if metric.is_semidefinite:
        yield from _semidefinite(G, tolerance)
    if "rows" in known:
        R = known["rows"]
        yield _equal("the metric is $R^T R$ for its root", R.T @ R, G, tolerance)
        yield _equal("`root_mv` multiplies by the root", known["images"], np.asarray(directions) @ R.T, tolerance)
        yield _equal("`root_gram` is $R R^T$", known["gram"], R @ R.T, tolerance)
        yield from _covariance("`sample`", known["samples"], G)


@_laws.register
def _of_solver(solver: lx.AbstractLinearSolver, *at: PyTree) -> Iterator[Law]:
    metric = ng.pullback(lambda w, x: x @ w, ng.Euclidean(), _normal(0, 4), _normal(1, 7, 4))
    covector, damping, step = _normal(2, 4), 0.3, 1e-5
    damped = np.asarray(metric.as_matrix()) + damping * np.eye(4)

    @jax.jit
    def solve(covector, damping):
        solution = ng.solve(metric, covector, damping=damping, solver=solver)
        return solution.value, solution.result == ng.RESULTS.successful

    value, is_successful = solve(covector, damping)
    _, slope = jax.jvp(lambda damping: solve(covector, damping)[0], (damping,), (1.0,))
    difference = (solve(covector, damping + step)[0] - solve(covector, damping - step)[0]) / (2 * step)
    yield _equal("the damped system is solved", damped @ np.asarray(value), np.asarray(covector), 1e-3)
    yield Law("a solution is reported as successful", 0.0 if bool(is_successful) else np.inf)
    yield _equal("the derivative by the damping agrees with differences", slope, difference, 1e-2)


def _part_laws(name: str) -> Callable[..., Iterator[Law]]:
    """Laws of what `NaturalGradient` takes as the argument `name`."""

    def laws(instance: Any, *at: PyTree) -> Iterator[Law]:
        params = {"w": 0.5 * _normal(3, 3, 4), "v": 0.5 * _normal(4, 4, 1)}
        x = _normal(5, 24, 3)
        batch = x, jnp.sin(x @ _normal(6, 3, 1))
        opt = ng.NaturalGradient(lambda p, x: jnp.tanh(x @ p["w"]) @ p["v"], ng.LeastSquares(), **{name: instance})
        state = opt.init(params, batch)
        first = opt.step(params, state, batch)

        @eqx.filter_jit
        def run(opt, params, state):
            def step(carry, _):
                params, state, info = opt.step(*carry, batch)
                return (params, state), info.loss

            return jax.lax.scan(step, (params, state), length=25)

        (_, last), losses = run(opt, params, state)
        compiled = eqx.filter_jit(lambda opt, params, state: opt.step(params, state, batch))(opt, params, state)
        yield _equal("a compiled step is the step", _flat(compiled[0]), _flat(first[0]), 1e-5)
        is_kept = jax.tree.structure(last) == jax.tree.structure(state)
        yield Law("a step keeps the shapes of the state", 0.0 if is_kept else np.inf)
        yield Law("the loss stays finite", 0.0 if bool(jnp.all(jnp.isfinite(losses))) else np.inf)
        yield Law("the loss of a small regression falls within 25 steps", float(losses[-1] / losses[0]))

    return laws


for _abstract, _name in (
    (ng.AbstractStructure, "structure"),
    (ng.AbstractDamping, "damping"),
    (ng.AbstractStep, "step"),
    (ng.AbstractMomentum, "momentum"),
    (ng.AbstractGuard, "guard"),
):
    _laws.register(_abstract, _part_laws(_name))


def _semidefinite(G: np.ndarray, tolerance: float = TOLERANCE) -> Iterator[Law]:
    size = float(np.abs(G).max(initial=0.0))
    yield _equal("the metric is symmetric", G, G.T, tolerance)
    least = np.linalg.eigvalsh((G + G.T) / 2).min(initial=0.0)
    yield _equal("the metric is positive semidefinite", np.minimum(least, 0.0), 0.0, tolerance, scale=size)


def _covariance(name: str, samples: np.ndarray, G: np.ndarray) -> Iterator[Law]:
    yield _mean(f"{name} has mean zero", samples, np.zeros(samples.shape[1]))
    yield _mean(f"{name} has the metric for its covariance", samples[:, :, None] * samples[:, None, :], G)


def _equal(name: str, left: Any, right: Any, tolerance: float = TOLERANCE, scale: float | None = None) -> Law:
    """Two sides that should agree, relative to their largest entry, or to `scale` where one side is zero."""
    left, right = np.asarray(left), np.asarray(right)
    if left.shape != right.shape:
        return Law(f"{name}: shapes {left.shape} and {right.shape}", np.inf)
    size = max(np.abs(left).max(initial=0.0), np.abs(right).max(initial=0.0)) if scale is None else scale
    error = np.abs(left - right).max(initial=0.0) / (tolerance * max(size, np.finfo(float).tiny))
    return Law(name, float(error) if np.isfinite(error) else np.inf)


def _mean(name: str, samples: np.ndarray, expected: Any) -> Law:
    """An average that should be the expectation, within its standard error."""
    errors = samples.std(axis=0, ddof=1) / np.sqrt(len(samples))
    gap = np.abs(samples.mean(axis=0) - np.asarray(expected))
    allowed = NUM_ERRORS * errors + 1e-9 * np.abs(np.asarray(expected)) + np.finfo(float).tiny
    excess = np.max(gap / allowed, initial=0.0)
    return Law(name, float(excess) if np.isfinite(excess) else np.inf)


def _single(at: tuple, what: str) -> PyTree:
    if len(at) != 1:
        raise TypeError(f"{caller()} needs a second argument here: {what}.")
    return at[0]


def _wide(leaf: Any) -> Array:
    return jnp.asarray(np.asarray(leaf), float)


def _flat(tree: PyTree) -> Float[Array, " P"]:
    return ravel_pytree(tree)[0]


def _normal(seed: int, *shape: int) -> Float[Array, "..."]:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))
