"""The result of a proximal step, with outcomes in words, and the search for a step inside the domain."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from natgrad import _tree
from natgrad._proximal.spaces import ProximalProblem
from natgrad._solve.base import RESULTS
from natgrad._types import Scalar


class PROXIMAL_RESULTS(RESULTS):  # pyright: ignore[reportGeneralTypeIssues]
    """Outcomes of a proximal step: the outcomes of a linear solve, and four more.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    problem = ng.ProximalProblem(lambda w: jnp.sum(w**2), ng.Euclidean(), strength=2.0)
    step = ng.natural_step(problem, jnp.array([1.0]))
    assert step.result == ng.PROXIMAL_RESULTS.successful
    ```
    """

    unfinished = (
        "The inner iteration stopped before it was accurate; see `residual`. Likely causes: (a) `max_steps` is too "
        "small; (b) the tolerances of the solver are below rounding: use float64; (c) with so small a `strength` there "
        "is no minimum: raise it."
    )
    shortened = (
        "The step would have left the set on which the geometry is defined. `strength` was doubled until it stayed "
        "inside."
    )
    left_domain = "The step leaves the set on which the geometry is defined, and was not taken. Raise `strength`."
    no_multiplier = (
        "No stationary point on the boundary of the trust region was found. The value is a step along the natural "
        "gradient that stays inside and lowers the cost, or no step if there was none."
    )


class ProximalStep(eqx.Module):
    r"""The result of a proximal step.

    **Attributes:**

    - `value`: the new point; the old point if no finite point inside the domain was found.
    - `cost`, `divergence`: $J(u)$ and $\rho(u, w)$ at the new point $u$.
    - `residual`: the length of the gradient of the function that the step minimises, at `value`, relative to the length
      of the gradient of the cost at the start. Zero for a step in closed form.
    - `strength`: $\mu$. Larger than in the problem if a step with that strength would have left the domain; for a trust
      region, the multiplier of the constraint.
    - `num_steps`: steps of the inner iteration; zero without one.
    - `result`: a member of `PROXIMAL_RESULTS`, whose text says what happened.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    problem = ng.ProximalProblem(lambda w: jnp.sum(w**2), ng.Euclidean(), strength=2.0)
    step = ng.natural_step(problem, jnp.array([1.0]))
    assert jnp.allclose(step.value, 0.0) and jnp.allclose(step.divergence, 0.5)
    ```
    """

    value: PyTree
    cost: Scalar
    divergence: Scalar
    residual: Scalar
    strength: Scalar
    num_steps: Int[Array, ""]
    result: PROXIMAL_RESULTS


def conclude(
    problem: ProximalProblem,
    w: PyTree,
    value: PyTree,
    mismatch: PyTree,
    *,
    strength: Scalar | None = None,
    num_steps: Any = 0,
    result: Any = None,
    has_inner: bool = False,
) -> ProximalStep:
    """The step to `value`, or no step if that is not finite or not in the domain.

    `mismatch` is the gradient, at `value`, of the function that the step minimises. With `has_inner` it decides whether
    the inner iteration was accurate."""
    results: Any = PROXIMAL_RESULTS
    result = results.successful if result is None else result
    gradient = problem.gradient(w)
    numbers = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves((value, gradient))]
    is_finite = jnp.all(jnp.stack(numbers))

    def or_start(is_good: Bool[Array, ""], point: PyTree) -> PyTree:
        return _tree.where(is_good, point, w)

    value = or_start(is_finite, value)
    is_inside = problem.space.contains(value)
    # Before the cost, which may not be defined outside.
    value = or_start(is_inside, value)
    cost = jnp.asarray(problem.cost(value))
    is_finite &= jnp.isfinite(cost)
    value = or_start(is_finite, value)

    def length(covector: PyTree) -> Scalar:
        tangent = problem.space.tangent(covector)
        return jnp.sqrt(_tree.vdot(tangent, tangent))

    start = length(gradient)
    # At a stationary point both are zero, and so is their ratio.
    residual = length(mismatch) / jnp.where(start > 0, start, 1.0)
    if has_inner:
        eps = float(jnp.finfo(_tree.flatten(w)[0].dtype).eps)
        result = results.where(is_solved(residual, eps), result, results.unfinished)
    result = results.where(is_inside, result, results.left_domain)
    return ProximalStep(
        value,
        cost,
        problem.space.dissimilarity(value, w),
        jnp.where(is_finite & is_inside, residual, jnp.nan),
        problem.strength if strength is None else strength,
        jnp.asarray(num_steps),
        results.where(is_finite, result, results.not_finite),
    )


def is_solved(residual: Scalar, eps: float) -> Bool[Array, ""]:
    """Whether an inner iteration has converged, by its residual.

    The solver's own flag is not enough: it can be set on a sequence that diverges, and rounding can keep it unset."""
    return residual <= eps ** (1 / 3)


class Candidate(NamedTuple):
    """A point inside the domain, its strength, and the outcome of the search."""

    point: PyTree
    strength: Scalar
    result: Any


def within_domain(problem: ProximalProblem, w: PyTree, candidate: Any) -> Candidate:
    """Double the strength of the problem until `candidate(strength)` stays inside the domain.

    `candidate` returns a point and whether it exists."""

    def double(state, _):
        strength, _, is_inside = state

        def try_double():
            point, exists = candidate(2 * strength)
            return 2 * strength, point, exists & problem.space.contains(point)

        return jax.lax.cond(is_inside, lambda: state, try_double), None

    # From half the strength, so that `candidate` is written down once. Not a `while_loop`, which has no reverse-mode
    # derivative (JAX 0.10.1). Reproduced by `test_while_loops_have_no_gradient`.
    start = problem.strength / 2, w, jnp.array(False)
    (strength, point, is_inside), _ = jax.lax.scan(double, start, length=60)
    point = _tree.where(is_inside, point, w)
    results: Any = PROXIMAL_RESULTS
    result = results.where(strength > problem.strength, results.shortened, results.successful)
    return Candidate(point, strength, results.where(is_inside, result, results.left_domain))
