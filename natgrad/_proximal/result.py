"""What a proximal step says about itself."""

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
    """Outcomes of a proximal step: those of a linear solve, and these."""

    unfinished = (
        "The inner iteration stopped before it was accurate; look at `residual`. Likely causes: (a) `max_steps` is too "
        "small; (b) the tolerances of the solver are below rounding: use float64; (c) the cost has no minimum, since "
        "`strength` is too small for it."
    )
    shortened = (
        "The step would have left the set on which the geometry is defined. `strength` was doubled until it stayed "
        "inside."
    )
    left_domain = "The step leads out of the set on which the geometry is defined, and was not taken. Raise `strength`."
    no_multiplier = (
        "No point on the boundary of the trust region was found at which cost and dissimilarity balance. The value is "
        "a step along the natural gradient that stays inside and lowers the cost, if there was one."
    )


class ProximalStep(eqx.Module):
    r"""Where a step ended.

    **Attributes:**

    - `value`: the new point; the old one where nothing finite inside the domain was found.
    - `cost`: $J$ there, and `divergence` $\rho$ from the old point to it.
    - `residual`: the length of the gradient of what the step minimises, at `value`, relative to that of the cost at the
      start. Zero for a step that was found exactly.
    - `strength`: the $\mu$ that was used: larger than the given one if that would have led out of the domain; of a
      trust region, the multiplier of its constraint.
    - `num_steps`: of the inner iteration; zero if there was none.
    - `result`: a member of `PROXIMAL_RESULTS`, whose text says what happened.
    """

    value: PyTree
    cost: Scalar
    divergence: Scalar
    residual: Scalar
    strength: Scalar
    num_steps: Int[Array, ""]
    result: PROXIMAL_RESULTS


def concluded(
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
    """The step to `value`, or none if that is not finite or not in the domain. `mismatch` is the gradient of what the
    step minimises; after an inner iteration, whether that was found is judged by it."""
    results: Any = PROXIMAL_RESULTS
    result = results.successful if result is None else result
    gradient = problem.gradient(w)
    numbers = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves((value, gradient))]
    is_finite = jnp.all(jnp.stack(numbers))
    stay = lambda good, point: jax.tree.map(lambda new, old: jnp.where(good, new, old), point, w)
    value = stay(is_finite, value)
    is_inside = problem.space.contains(value)
    value = stay(is_inside, value)
    cost = jnp.asarray(problem.cost(value))
    is_finite &= jnp.isfinite(cost)
    value = stay(is_finite, value)

    def length(covector: PyTree) -> Scalar:
        visible = problem.space.tangent(covector)
        return jnp.sqrt(_tree.vdot(visible, visible))

    start = length(gradient)
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
    """Whether an inner iteration has done its work: not by its own verdict, which a run-away satisfies and rounding may
    deny."""
    return residual <= eps ** (1 / 3)


class Candidate(NamedTuple):
    """A point inside the domain, the strength it belongs to, and what came of the search."""

    point: PyTree
    strength: Scalar
    result: Any


def within_domain(problem: ProximalProblem, w: PyTree, candidate: Any) -> Candidate:
    """`candidate(strength)`, a point and whether it is one, at the least strength that stays inside the domain,
    doubling it from the given one."""

    def double(state, _):
        def doubled():
            strength = 2 * state[0]
            point, there_is_one = candidate(strength)
            return strength, point, there_is_one & problem.space.contains(point)

        return jax.lax.cond(state[2], lambda: state, doubled), None

    # From half the strength, so that the candidate is compiled once; and without a while loop, which has no gradient.
    start = problem.strength / 2, w, jnp.array(False)
    (strength, point, is_inside), _ = jax.lax.scan(double, start, length=60)
    point = jax.tree.map(lambda new, old: jnp.where(is_inside, new, old), point, w)
    results: Any = PROXIMAL_RESULTS
    result = results.where(strength > problem.strength, results.shortened, results.successful)
    return Candidate(point, strength, results.where(is_inside, result, results.left_domain))
