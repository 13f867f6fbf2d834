from natgrad import _tree
from natgrad._metric.blocks import BlockMetric
from natgrad._solve.base import AbstractSolver, System, accurate
from natgrad._solve.result import RESULTS


class Blockwise(AbstractSolver):
    """Block by block, for metrics made of blocks (`kfac`, `ekfac`): the dense solution, at the cost of decomposing the
    factors.

    Damping is added to the blocks, not to their factors; for that, use `BlockMetric.inverse(damping, factored=True)`.
    Without damping it is the pseudo-inverse of every block, and the residual is the part of the covector that no step
    can change."""

    def compute(self, system: System):
        metric = system.operator
        if not isinstance(metric, BlockMetric):
            raise TypeError(
                f"`Blockwise` needs a metric made of blocks, but got `{type(metric).__name__}`. Use `Auto`."
            )
        inverse = metric.inverse(0.0 if system.is_undamped else system.damping)
        value = _tree.flatten(inverse.mv(system.unflatten(system.covector)))[0].astype(system.covector.dtype)
        solved = RESULTS.successful if system.is_undamped else accurate(system, value)
        return value, RESULTS.where(inverse.failures == 0, solved, RESULTS.not_finite), {}
