"""Minimising what has no closed form."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optimistix as optx
from jaxtyping import Array, Float, Int, PyTree

from natgrad import _tree
from natgrad._proximal.problem import ProximalProblem
from natgrad._types import Scalar

# Up to how many parameters a dense estimate of the Hessian is kept.
DENSE = 500


class Around(NamedTuple):
    """The points around one: changes of it as vectors, which stay in the affine space where the geometry is defined."""

    problem: ProximalProblem
    w: PyTree

    @property
    def start(self) -> Float[Array, " P"]:
        """No change, in the default precision, which some solvers insist on."""
        return jnp.zeros(_tree.size(self.w), float)

    @property
    def eps(self) -> float:
        """The rounding of the parameters."""
        return float(jnp.finfo(_tree.flatten(self.w)[0].dtype).eps)

    def point(self, change: Float[Array, " P"]) -> PyTree:
        flat, unflatten = _tree.flatten(self.w)
        wide = jax.tree.map(lambda leaf: leaf.astype(change.dtype), self.w)
        step = self.problem.space.tangent(_tree.flatten(wide)[1](change))
        return unflatten(flat.astype(change.dtype) + _tree.flatten(step)[0])

    def guarded(self, function: Callable[[PyTree], Scalar]) -> Callable[[Array], Scalar]:
        """A function of the change, infinite outside the domain, where it is not evaluated."""

        def of_change(change: Float[Array, " P"]) -> Scalar:
            u = self.point(change)
            is_inside = self.problem.space.contains(u)
            safe = jax.tree.map(lambda new, old: jnp.where(is_inside, new, old), u, self.w)
            return jnp.where(is_inside, function(safe), jnp.inf).astype(change.dtype)

        return of_change


class Minimum(NamedTuple):
    value: PyTree
    gradient: PyTree
    num_steps: Int[Array, ""]


def minimised(
    problem: ProximalProblem,
    w: PyTree,
    function: Callable[[PyTree], Scalar],
    solver: optx.AbstractMinimiser | None,
    max_steps: int,
) -> Minimum:
    """The minimum of a function near a point, by a solver of optimistix: BFGS by default, with limited memory if there
    are many parameters."""
    around = Around(problem, w)
    if solver is None:
        tolerance = around.eps**0.75
        kind = optx.BFGS if around.start.size <= DENSE else optx.LBFGS
        solver = kind(rtol=tolerance, atol=tolerance)
    objective = around.guarded(function)
    found = optx.minimise(lambda d, _: objective(d), solver, around.start, max_steps=max_steps, throw=False)
    value = around.point(found.value)
    return Minimum(value, jax.grad(function)(value), found.stats["num_steps"])
