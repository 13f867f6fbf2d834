from typing import Any

import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._check import Requirement, real_array, require
from natgrad._proximal.inner import minimised
from natgrad._proximal.problem import ProximalProblem
from natgrad._proximal.step import PROXIMAL_RESULTS, ProximalStep, concluded
from natgrad._solve.solve import solve
from natgrad._types import Scalar

# By how much, relative to the radius, rounding may carry a step beyond it.
SLACK = 1e-6


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
    subject = "`trust_region_step`"
    problem.check(w, subject)
    radius = real_array(radius, f"{subject}: `radius`")
    positive = Requirement(radius > 0, "a `radius` above 0", "It is in the units of the dissimilarity.")
    radius = require(radius, [positive], subject)
    natural = _fitting(problem, w, radius)
    start, multiplier = _nearby(problem, w, radius, natural)
    gradient = problem.gradient(w)
    size = jnp.sqrt(_tree.vdot(gradient, gradient))
    distance = lambda u: problem.space.dissimilarity(u, w)
    scale = jnp.where(size > 0, size, 1.0)

    def balance(unknown, _):
        u, mu = unknown
        total = _tree.add(problem.gradient(u), _tree.scale(mu, jax.grad(distance)(u)))
        return _tree.scale(1 / scale, total), distance(u) / radius.astype(scale.dtype) - 1

    if solver is None:
        tolerance = float(jnp.finfo(size.dtype).eps) ** (2 / 3)
        solver = optx.LevenbergMarquardt(rtol=tolerance, atol=tolerance)
    found = optx.root_find(balance, solver, (start, multiplier), max_steps=max_steps, throw=False)
    value, mu = found.value
    is_outer = (distance(value) <= radius * (1 + SLACK)) & (problem.cost(value) <= problem.cost(w)) & (mu >= 0)
    # Not by the solver's own verdict, which rounding may keep from the last digits.
    off = balance(found.value, None)
    is_outer &= _tree.vdot(off, off) <= jnp.finfo(size.dtype).eps
    # A negative multiplier: the cost would fall further inside.
    inside = lambda: minimised(problem.cost, w, None, max_steps)[:1]
    (inner,) = jax.lax.cond(mu < 0, inside, lambda: (w,))
    is_inner = (mu < 0) & (distance(inner) <= radius * (1 + SLACK)) & problem.space.contains(inner)
    choose = lambda a, b, c: jnp.where(is_inner, a, jnp.where(is_outer, b, c))
    value = jax.tree.map(choose, inner, value, natural[0])
    mu = choose(0.0, mu, natural[1])
    mismatch = _tree.add(problem.gradient(value), _tree.scale(mu, jax.grad(distance)(value)))
    results: Any = PROXIMAL_RESULTS
    result = results.where(is_inner | is_outer, results.successful, results.no_multiplier)
    steps = found.stats["num_steps"]
    return concluded(problem, w, value, mismatch, strength=mu, num_steps=steps, result=result)


def _nearby(
    problem: ProximalProblem, w: PyTree, radius: Scalar, natural: tuple[PyTree, Scalar]
) -> tuple[PyTree, Scalar]:
    """A proximal point with about the radius and its strength, if some are found; else the natural-gradient step."""

    def closer(_, state):
        _, mu, _ = state
        lagrangian = lambda u: problem.cost(u) + (mu * problem.space.dissimilarity(u, w)).astype(mu.dtype)
        u = minimised(lagrangian, w, None, 100).value
        ratio = problem.space.dissimilarity(u, w) / radius.astype(mu.dtype)
        # Of small steps the dissimilarity falls with the square of the strength.
        return u, mu * jnp.clip(jnp.sqrt(ratio), 0.2, 5.0), ratio

    start = *natural, jnp.zeros((), natural[1].dtype)
    u, mu, ratio = jax.lax.fori_loop(0, 8, closer, start)
    is_close = (ratio > 0.5) & (ratio < 2) & jnp.isfinite(mu)
    return jax.tree.map(lambda new, old: jnp.where(is_close, new, old), (u, mu), natural)


def _fitting(problem: ProximalProblem, w: PyTree, radius: Scalar) -> tuple[PyTree, Scalar]:
    """The step along the natural gradient that fits the radius in the true dissimilarity, and its multiplier in the
    quadratic one."""
    gradient = problem.gradient(w)
    direction = solve(problem.space.metric(w), gradient).value
    steepness = jnp.sqrt(jnp.maximum(_tree.vdot(gradient, direction), 0.0))
    length = jnp.sqrt(2 * radius).astype(steepness.dtype) / jnp.where(steepness > 0, steepness, 1.0)
    moved = lambda size: _tree.subtract(w, _tree.scale(size, direction))

    def too_long(state):
        size, count = state
        point = moved(size)
        fits = (problem.space.dissimilarity(point, w) <= radius) & problem.space.contains(point)
        return ~fits & (count < 60)

    size, _ = jax.lax.while_loop(too_long, lambda state: (state[0] / 2, state[1] + 1), (length, jnp.array(0)))
    return moved(size), 1 / length
