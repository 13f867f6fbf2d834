from natgrad._metric.base import AbstractMetric
from natgrad._metric.blocks import BlockMetric
from natgrad._solve.base import AbstractSolver, System
from natgrad._solve.blockwise import Blockwise
from natgrad._solve.cg import CG, is_traceable
from natgrad._solve.cholesky import Cholesky
from natgrad._solve.elementwise import Elementwise
from natgrad._solve.pseudo_inverse import PseudoInverse
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
