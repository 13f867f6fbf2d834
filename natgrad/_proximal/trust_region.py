from typing import Any

import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, PyTree

from natgrad import _tree
from natgrad._check import Requirement, caller, public, real_array, require
from natgrad._proximal.result import PROXIMAL_RESULTS, ProximalStep, concluded, is_solved
from natgrad._proximal.spaces import ProximalProblem
from natgrad._proximal.steps import Around, minimised
from natgrad._solve.solve import solve
from natgrad._types import Scalar

# By how much, relative to the radius, rounding may carry a step beyond it.
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
    r"""A point where the cost is stationary among those with $\rho(u, w) \le r$: the `strength` of the problem is not
    used, and that of the step is the multiplier of the constraint, zero if a minimum of the cost lies inside.

    On the boundary $\nabla J(u) + \mu\nabla_u\rho(u, w) = 0$ and $\rho(u, w) = r$, solved together for $u$ and $\mu$:
    from a proximal point of about that radius, or from the natural-gradient step that fits it if there is none. Every
    proximal point solves the trust region of its own radius. The converse needs a convex cost and dissimilarity:
    elsewhere this finds steps that no strength would give."""
    problem.check(w)
    around = Around(problem, w)
    radius = real_array(radius, f"{caller()}: `radius`")
    if radius.ndim:
        raise ValueError(f"{caller()} needs one number for `radius`, but got an array of shape {radius.shape}.")
    positive = Requirement(radius > 0, "a `radius` above 0", "It is in the units of the dissimilarity.")
    radius = require(radius, [positive]).astype(around.start.dtype)
    distance = lambda u: problem.space.dissimilarity(u, w).astype(radius.dtype)
    gradient = problem.space.tangent(problem.gradient(w))
    size = jnp.sqrt(_tree.vdot(gradient, gradient)).astype(radius.dtype)
    scale = jnp.where(size > 0, size, 1.0)
    natural = _fitting(around, radius)
    cost, far = around.guarded(problem.cost), around.guarded(distance)

    def balance(unknown, _):
        change, mu = unknown
        total = jax.grad(cost)(change) + mu * jax.grad(far)(change)
        return total / scale, far(change) / radius - 1

    if solver is None:
        tolerance = around.eps ** (2 / 3)
        solver = optx.LevenbergMarquardt(rtol=tolerance, atol=tolerance)
    found = optx.root_find(balance, solver, _nearby(around, radius, natural), max_steps=max_steps, throw=False)
    change, mu = found.value
    value = around.point(change)
    off = balance(found.value, None)
    # Not by the solver's own verdict, which rounding may keep from the last digits.
    is_outer = (_tree.vdot(off, off) <= around.eps) & (mu >= 0)
    is_outer &= (distance(value) <= radius * (1 + SLACK)) & (cost(change) <= cost(around.start))
    # A negative multiplier, or none found: there may be a minimum inside.
    inner = jax.lax.cond(is_outer, lambda: w, lambda: minimised(problem, w, problem.cost, None, max_steps).value)
    rest = problem.space.tangent(problem.gradient(inner))
    is_inner = ~is_outer & (distance(inner) <= radius * (1 + SLACK)) & problem.space.contains(inner)
    is_inner &= is_solved(jnp.sqrt(_tree.vdot(rest, rest)) / scale, around.eps)
    choose = lambda a, b, c: jnp.where(is_inner, a, jnp.where(is_outer, b, c))
    value = jax.tree.map(choose, inner, value, around.point(natural[0]))
    mu = choose(0.0, mu, natural[1])
    mismatch = _tree.add(problem.gradient(value), _tree.scale(mu, jax.grad(distance)(value)))
    results: Any = PROXIMAL_RESULTS
    result = results.where(is_inner | is_outer, results.successful, results.no_multiplier)
    steps = found.stats["num_steps"]
    return concluded(problem, w, value, mismatch, strength=mu, num_steps=steps, result=result)


def _nearby(around: Around, radius: Scalar, natural: tuple[Array, Scalar]) -> tuple[Array, Scalar]:
    """A proximal point with about the radius and its strength, if some are found; else the natural-gradient step."""
    problem, w = around.problem, around.w
    distance = lambda u: problem.space.dissimilarity(u, w).astype(radius.dtype)

    def closer(_, state):
        _, mu, _ = state
        lagrangian = lambda u: problem.cost(u).astype(mu.dtype) + mu * distance(u)
        u = minimised(problem, w, lagrangian, None, 100).value
        ratio = distance(u) / radius
        # Of small steps the dissimilarity falls with the square of the strength.
        change = _tree.flatten(_tree.subtract(u, w))[0].astype(mu.dtype)
        return change, mu * jnp.clip(jnp.sqrt(ratio), 0.2, 5.0), ratio

    change, mu, ratio = jax.lax.fori_loop(0, 8, closer, (*natural, jnp.zeros_like(radius)))
    is_close = (ratio > 0.5) & (ratio < 2) & jnp.isfinite(mu)
    return jax.tree.map(lambda new, old: jnp.where(is_close, new, old), (change, mu), natural)


def _fitting(around: Around, radius: Scalar) -> tuple[Array, Scalar]:
    """A change along the natural gradient that fits the radius in the true dissimilarity and lowers the cost, and its
    multiplier in the quadratic one."""
    problem, w = around.problem, around.w
    gradient = problem.gradient(w)
    direction = _tree.flatten(solve(problem.space.metric(w), gradient).value)[0].astype(radius.dtype)
    steepness = jnp.sqrt(jnp.maximum(_tree.flatten(gradient)[0].astype(radius.dtype) @ direction, 0.0))
    length = jnp.sqrt(2 * radius) / jnp.where(steepness > 0, steepness, 1.0)
    cost = around.guarded(problem.cost)
    distance = around.guarded(lambda u: problem.space.dissimilarity(u, w))

    def too_long(state):
        size, count = state
        fits = (distance(-size * direction) <= radius) & (cost(-size * direction) <= cost(around.start))
        return ~fits & (count < 60)

    size, count = jax.lax.while_loop(too_long, lambda state: (state[0] / 2, state[1] + 1), (length, jnp.array(0)))
    size = jnp.where(count < 60, size, 0.0)
    return -size * direction, 1 / jnp.where(size > 0, size, 1.0)
