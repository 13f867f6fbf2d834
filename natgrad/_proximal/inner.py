"""Minimising what has no closed form."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optimistix as optx
from jaxtyping import Array, Int, PyTree

from natgrad import _tree
from natgrad._proximal.step import PROXIMAL_RESULTS
from natgrad._types import Scalar

# Up to how many parameters a dense estimate of the Hessian is kept.
DENSE = 500


class Minimum(NamedTuple):
    value: PyTree
    gradient: PyTree
    num_steps: Int[Array, ""]
    result: Any


def minimised(
    function: Callable[[PyTree], Scalar], start: PyTree, solver: optx.AbstractMinimiser | None, max_steps: int
) -> Minimum:
    """The minimum of a function by a solver of optimistix: BFGS by default, with limited memory if there are many
    parameters."""
    if solver is None:
        tolerance = float(jax.numpy.finfo(_tree.flatten(start)[0].dtype).eps) ** 0.75
        kind = optx.BFGS if _tree.size(start) <= DENSE else optx.LBFGS
        solver = kind(rtol=tolerance, atol=tolerance)
    found = optx.minimise(lambda u, _: function(u), solver, start, max_steps=max_steps, throw=False)
    results: Any = PROXIMAL_RESULTS
    is_done = found.result == optx.RESULTS.successful
    result = results.where(is_done, results.successful, results.unfinished)
    return Minimum(found.value, jax.grad(function)(found.value), found.stats["num_steps"], result)
