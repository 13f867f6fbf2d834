r"""The trust-region step: a stationary point of the cost among points with $\rho(u, w) \le r$."""

from typing import Any

import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Bool, PyTree

from natgrad import _tree
from natgrad._check import Requirement, caller, public, real_array, require
from natgrad._proximal.result import PROXIMAL_RESULTS, ProximalStep, conclude, is_solved
from natgrad._proximal.spaces import ProximalProblem
from natgrad._proximal.steps import Neighbourhood, minimise
from natgrad._solve.solve import solve
from natgrad._types import Scalar

# Rounding may put a step on the boundary outside the radius, by at most this fraction of it.
SLACK = 1e-6


@public
def trust_region_step(
    problem: ProximalProblem,
    w: PyTree,
    radius: Any,
    *,
    solver: optx.AbstractLeastSquaresSolver | None = None,
    max_steps: int = 1000,
) -> ProximalStep:
    r"""A stationary point of the cost among the points with $\rho(u, w) \le r$.

    On the boundary $\nabla J(u) + \mu\nabla_u\rho(u, w) = 0$ and $\rho(u, w) = r$ are solved together for $u$ and
    $\mu$, starting from a proximal point of about this radius, or from a natural-gradient step if there is none. The
    `strength` of the result is the multiplier $\mu$, zero if a minimum of the cost lies inside; the `strength` of the
    problem is not used. Every proximal point solves the trust region of its own radius. The converse holds for convex
    cost and dissimilarity; elsewhere a trust region finds steps that no strength would give.

    **Arguments:**

    - `problem`: cost and dissimilarity.
    - `w`: the point to start from, a tree of arrays.
    - `radius`: $r > 0$, in the units of the dissimilarity.
    - `solver`: a least-squares solver of optimistix, by default Levenberg-Marquardt.
    - `max_steps`: of the inner iteration, by default 1000.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    problem = ng.ProximalProblem(lambda w: jnp.sum(w), ng.Euclidean())
    step = ng.trust_region_step(problem, jnp.zeros(2), radius=1.0)
    assert jnp.allclose(step.value, -1.0, atol=1e-3) and jnp.allclose(step.divergence, 1.0, atol=1e-3)
    ```
    """
    problem.check(w)
    around = Neighbourhood(problem, w)
    radius = _positive_number(radius).astype(around.start.dtype)
    gradient = problem.space.tangent(problem.gradient(w))
    slope = jnp.sqrt(_tree.vdot(gradient, gradient)).astype(radius.dtype)
    scale = jnp.where(slope > 0, slope, 1.0)
    natural = _natural_step_within(around, radius)
    cost, distance = around.guard(problem.cost), around.guard(around.distance)

    def balance(unknown, _):
        change, mu = unknown
        total = jax.grad(cost)(change) + mu * jax.grad(distance)(change)
        return total / scale, distance(change) / radius - 1

    if solver is None:
        tolerance = around.eps ** (2 / 3)
        solver = optx.LevenbergMarquardt(rtol=tolerance, atol=tolerance)
    start = _proximal_start(around, radius, natural)
    root = optx.root_find(balance, solver, start, max_steps=max_steps, throw=False)
    change, mu = root.value
    value = around.point(change)
    imbalance = balance(root.value, None)
    # The solver's own flag is not enough: rounding can keep it unset at the last digits.
    is_outer = (_tree.vdot(imbalance, imbalance) <= around.eps) & (mu >= 0)
    is_outer &= (around.distance(value) <= radius * (1 + SLACK)) & (cost(change) <= cost(around.start))
    # Without a root, or with a negative multiplier, there may be a minimum inside.
    inner, is_inner = _minimum_inside(around, radius, scale, max_steps, ~is_outer)

    def choose(inner: Any, outer: Any, fallback: Any) -> Array:
        return jnp.where(is_inner, inner, jnp.where(is_outer, outer, fallback))

    value = jax.tree.map(choose, inner, value, around.point(natural[0]))
    mu = choose(0.0, mu, natural[1])
    mismatch = _tree.add(problem.gradient(value), _tree.scale(mu, jax.grad(around.distance)(value)))
    results: Any = PROXIMAL_RESULTS
    result = results.where(is_inner | is_outer, results.successful, results.no_multiplier)
    return conclude(problem, w, value, mismatch, strength=mu, num_steps=root.stats["num_steps"], result=result)


def _positive_number(radius: Any) -> Scalar:
    radius = real_array(radius, f"{caller()}: `radius`")
    if radius.ndim:
        raise ValueError(f"{caller()} needs one number for `radius`, but got an array of shape {radius.shape}.")
    positive = Requirement(radius > 0, "a `radius` above 0", "It is in the units of the dissimilarity.")
    return require(radius, [positive])


def _minimum_inside(
    around: Neighbourhood, radius: Scalar, scale: Scalar, max_steps: int, is_needed: Bool[Array, ""]
) -> tuple[PyTree, Bool[Array, ""]]:
    """A minimum of the cost, looked for only where it is needed, and whether it lies inside the radius."""
    problem, w = around.problem, around.w
    inner = jax.lax.cond(is_needed, lambda: minimise(problem, w, problem.cost, None, max_steps).value, lambda: w)
    gradient = problem.space.tangent(problem.gradient(inner))
    is_inside = (around.distance(inner) <= radius * (1 + SLACK)) & problem.space.contains(inner)
    is_minimum = is_solved(jnp.sqrt(_tree.vdot(gradient, gradient)) / scale, around.eps)
    return inner, is_needed & is_inside & is_minimum


def _proximal_start(around: Neighbourhood, radius: Scalar, natural: tuple[Array, Scalar]) -> tuple[Array, Scalar]:
    """A proximal point of about the radius and its strength, if one is found; else the natural-gradient step."""
    problem, w = around.problem, around.w

    def adjust_strength(_, state):
        _, mu, _ = state

        def lagrangian(u: PyTree) -> Scalar:
            return problem.cost(u).astype(mu.dtype) + mu * around.distance(u)

        u = minimise(problem, w, lagrangian, None, 100).value
        ratio = around.distance(u) / radius
        # The dissimilarity of a small step is inversely proportional to the square of the strength.
        change = _tree.flatten(_tree.subtract(u, w))[0].astype(mu.dtype)
        return change, mu * jnp.clip(jnp.sqrt(ratio), 0.2, 5.0), ratio

    change, mu, ratio = jax.lax.fori_loop(0, 8, adjust_strength, (*natural, jnp.zeros_like(radius)))
    is_close = (ratio > 0.5) & (ratio < 2) & jnp.isfinite(mu)
    return _tree.where(is_close, (change, mu), natural)


def _natural_step_within(around: Neighbourhood, radius: Scalar) -> tuple[Array, Scalar]:
    """A change along the natural gradient within the radius that lowers the cost, and its multiplier in the quadratic
    model."""
    problem, w = around.problem, around.w
    gradient = problem.gradient(w)
    direction = _tree.flatten(solve(problem.space.metric(w), gradient).value)[0].astype(radius.dtype)
    steepness = jnp.sqrt(jnp.maximum(_tree.flatten(gradient)[0].astype(radius.dtype) @ direction, 0.0))
    length = jnp.sqrt(2 * radius) / jnp.where(steepness > 0, steepness, 1.0)
    cost = around.guard(problem.cost)
    distance = around.guard(around.distance)

    def is_too_long(state):
        size, count = state
        fits = (distance(-size * direction) <= radius) & (cost(-size * direction) <= cost(around.start))
        return ~fits & (count < 60)

    def halve(state):
        size, count = state
        return size / 2, count + 1

    size, count = jax.lax.while_loop(is_too_long, halve, (length, jnp.array(0)))
    size = jnp.where(count < 60, size, 0.0)
    return -size * direction, 1 / jnp.where(size > 0, size, 1.0)
