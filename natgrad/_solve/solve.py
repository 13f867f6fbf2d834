from collections.abc import Callable
from typing import Any

import lineax as lx
from jaxtyping import PyTree

from natgrad._check import is_concrete, public
from natgrad._geometry.base import AbstractGeometry
from natgrad._metric.base import AbstractMetric
from natgrad._metric.block_metric import BlockMetric
from natgrad._metric.pullback import pullback
from natgrad._solve.base import RESULTS, AbstractSolver, Solution, System, solve_system
from natgrad._solve.cg import CG, is_traceable
from natgrad._solve.direct import Blockwise, Cholesky, Elementwise, PseudoInverse
from natgrad._solve.sample_space import SampleSpace

# Sizes up to which a dense factorisation takes well under a second on one core.
DENSE = 2000


class Auto(AbstractSolver):
    """Picks a solver by sizes and says in `Solution.solver` which and why.

    With `dense` the largest matrix it will factorise: few parameters, the dense matrix (`Cholesky`, or
    `PseudoInverse` without damping); few samples, `SampleSpace`; otherwise `CG`. A diagonal metric is divided by, and
    one made of blocks is solved block by block."""

    dense: int = DENSE

    def compute(self, system: System):
        raise AssertionError("unreachable: `pick` names another solver")

    def pick(self, system: System) -> tuple[AbstractSolver, str]:
        solver, reason = self._choose(system)
        return solver, f"{type(solver).__name__}, because {reason}"

    def _choose(self, system: System) -> tuple[AbstractSolver, str]:
        size = system.covector.size
        rows = system.operator.root_size if isinstance(system.operator, AbstractMetric) else None
        if isinstance(system.operator, AbstractMetric) and system.operator.is_diagonal:
            return Elementwise(), "the metric is diagonal"
        if isinstance(system.operator, BlockMetric):
            return Blockwise(), "the metric is made of blocks"
        if not is_traceable(system.operator):
            return CG(), "the metric runs over a data loader"
        if rows is not None and rows < size and rows <= self.dense and not system.is_undamped:
            return SampleSpace(), f"{rows} samples are fewer than {size} parameters"
        if size <= self.dense:
            if system.is_undamped:
                return PseudoInverse(), f"{size} parameters fit a dense matrix, and there is no damping"
            return Cholesky(), f"{size} parameters fit a dense matrix"
        return CG(), f"{size} parameters are too many for a dense matrix"


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
