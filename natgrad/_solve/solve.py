"""Solving with a metric, and natural gradients."""

from collections.abc import Callable
from typing import Any

import lineax as lx
from jaxtyping import PyTree

from natgrad._check import is_concrete, public
from natgrad._geometry.base import AbstractGeometry
from natgrad._metric.pullback import pullback
from natgrad._solve.auto import Auto
from natgrad._solve.base import AbstractSolver, solve_system
from natgrad._solve.result import RESULTS, Solution


@public
def solve(
    operator: lx.AbstractLinearOperator, covector: PyTree, *, damping: Any = 0.0, solver: AbstractSolver | None = None
) -> Solution:
    r"""Solve $(G + \lambda I)v = g$ for a metric $G$, a covector $g$ and damping $\lambda \ge 0$.

    Never raises for a numerical failure: look at `result`, whose text says what went wrong, and at `stats`. A
    `Covector` gives a `Vector`; a plain tree gives a plain tree. Parameters of different dtypes are solved for in
    the widest of them. The default solver is `Auto()`."""
    return solve_system(operator, covector, damping, Auto() if solver is None else solver)


@public
def natural_gradient(
    model: Callable,
    geometry: AbstractGeometry,
    params: PyTree,
    x: PyTree,
    gradient: PyTree,
    *,
    damping: Any = 0.0,
    solver: AbstractSolver | None = None,
    has_aux: bool = False,
    check: bool = True,
) -> PyTree:
    r"""The natural gradient $(G + \lambda I)^{-1}g$: the `gradient` of any cost, turned into the direction that is
    steepest when steps are measured by how far they move the outputs of the model. Follow it downhill.

    Raises if the system could not be solved (a truncated `CG` counts as solved); use `pullback` and `solve` to decide
    for yourself. `has_aux` and `check` are as for `pullback`."""
    metric = pullback(model, geometry, params, x, has_aux=has_aux, check=check)
    solution = solve(metric, gradient, damping=damping, solver=solver)
    return raise_failure(solution)


def raise_failure(solution: Solution) -> PyTree:
    """The value of a solution, unless it failed."""
    value, result = solution.value, solution.result
    failed = ~((result == RESULTS.successful) | (result == RESULTS.max_steps_reached))
    if is_concrete(failed):
        if bool(failed):
            raise RuntimeError(f"The natural gradient could not be computed. {RESULTS[result]}")
        return value
    return result.error_if(value, failed)
