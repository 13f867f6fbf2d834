from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad import _tree
from natgrad._block.base import AbstractBlock
from natgrad._block.eigen import EigenBlock
from natgrad._block.factor import Factor
from natgrad._block.kronecker import KroneckerBlock
from natgrad._block.rules import BlockRules, check_blocks
from natgrad._block.structure_report import StructureReport
from natgrad._check import as_number, public
from natgrad._metric.block_metric import BlockMetric
from natgrad._metric.estimated_blocks import Bases, BlockEstimate, joined, with_values
from natgrad._metric.running import RunningAverage, RunningState
from natgrad._optimiser.info import STEP_RESULTS
from natgrad._optimiser.structure.base import Direction, check_periods, over_live, where_due
from natgrad._optimiser.structure.factored import AbstractFactoredStructure, block_damping
from natgrad._types import Scalar


class EKFACState(NamedTuple):
    """The running average of the Kronecker factors; the metric in the eigenvectors of the last refresh, whose values
    are a running average too; and the sum of its weights."""

    average: RunningState
    metric: BlockMetric
    weight: Scalar


class EKFAC(AbstractFactoredStructure):
    r"""Eigenvalue-corrected Kronecker factors (see `ekfac`), averaged over steps.

    Eigenvectors of averaged factors, computed now and then, and in them the second moments of gradients, averaged over
    steps. The current damping is used at every step, also between refreshes.

    **Arguments:**

    - `decay`, `refresh_every`, `update_every`, `batch_fraction`, `num_samples`, `blocks`: as for `KFAC`. Where the
      eigenvectors are refreshed, second moments start from the eigenvalues of the factors.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0], [2.0]])
    w, batch = jnp.zeros((1, 1)), (x, 3 * x)
    structure, damping, step = ng.EKFAC(refresh_every=20), ng.ConstantDamping(0.5), ng.ConstantStep(1.0)
    opt = ng.NaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), structure, damping, step=step)
    w, state, info = jax.jit(opt.step)(w, opt.init(w, batch), batch)
    assert jnp.allclose(w, 7.5 / 3)  # the gradient over the metric of 2.5 with damping
    ```
    """

    decay: Any
    refresh_every: int = eqx.field(static=True)
    update_every: int = eqx.field(static=True)
    batch_fraction: float = eqx.field(static=True)
    num_samples: int = eqx.field(static=True)
    blocks: BlockRules

    @public
    def __init__(
        self,
        decay: Any = 0.95,
        refresh_every: int = 10,
        *,
        update_every: int = 1,
        batch_fraction: float = 1.0,
        num_samples: int = 1,
        blocks: BlockRules | None = None,
    ):
        self.decay, self.refresh_every, self.update_every = as_number(decay), refresh_every, update_every
        self.batch_fraction, self.num_samples = batch_fraction, num_samples
        self.blocks = check_blocks(blocks)
        check_periods(self)

    def init(self, points, key, damping):
        estimates = self._estimates(points, key, is_corrected=True)
        factors = joined(estimates)
        metric = _decomposed(factors, factors.report())
        corrected = joined([of_term.with_bases(_bases(metric)) for of_term in estimates])
        metric = _decomposed(factors, corrected.report())
        return EKFACState(RunningAverage(self.decay).init(factors), metric, jnp.zeros(()))

    def update(self, state, points, key, schedule, is_good):
        def new():
            estimates = self._estimates(points, key, is_corrected=True)
            factors = joined(estimates)
            is_new = is_good & jnp.isfinite(factors.trace())
            average = RunningAverage(self.decay).update(state.average, factors, is_good=is_new)

            def start() -> tuple[BlockMetric, Scalar]:
                return _decomposed(RunningAverage(self.decay)._value(average), state.metric.report()), average.weight

            metric, weight = where_due(schedule.is_due(self.refresh_every), start, (state.metric, state.weight))
            return EKFACState(average, *self._corrected(metric, weight, estimates, is_good))

        return new() if self.update_every == 1 else where_due(schedule.is_due(self.update_every), new, state)

    def mean_eigenvalue(self, state, points, key):
        factors = RunningAverage(self.decay)._value(state.average)
        return over_live(state.metric.trace(), _tree.flatten(factors.diagonal())[0])

    def direction(self, state, points, covector, damping):
        operator = state.metric.operator
        per_block = block_damping(state.metric, damping)
        inverse = operator.replaced([block.inverted([], per_block[k]) for k, block in enumerate(operator.blocks)])
        return Direction(inverse.mv(covector), STEP_RESULTS.successful, jnp.array(0)), state

    def report(self, state):
        return state.metric.report()

    def check(self, damping):
        if damping.is_relative:
            raise ValueError(
                "`EKFAC` cannot be damped relative to the diagonal of the metric, which is not diagonal in its "
                'eigenvectors. Use `shape="identity"`, or `KFAC`.'
            )

    def _corrected(
        self, metric: BlockMetric, weight: Scalar, estimates: list[BlockEstimate], is_good: Any
    ) -> tuple[BlockMetric, Scalar]:
        """The metric with the second moments of this step, in its eigenvectors, among its values."""
        fresh = joined([of_term.with_bases(_bases(metric)) for of_term in estimates])
        total = self.decay * weight + 1
        kept, part = self.decay * weight / total, 1 / total
        is_good = is_good & jnp.isfinite(fresh.trace())
        mixed = lambda old, new: jnp.where(is_good, kept.astype(old.dtype) * old + part.astype(old.dtype) * new, old)
        pairs: Any = zip(metric.operator.blocks, fresh.operator.blocks, strict=True)
        blocks = [with_values(old, mixed(old.values, values_in(old, new))) for old, new in pairs]
        corrected = BlockMetric(metric.operator.replaced(blocks), metric.report(), metric.num_examples)
        return corrected, jnp.where(is_good, total, weight)


def _decomposed(factors: BlockMetric, report: StructureReport) -> BlockMetric:
    """The metric of the factors, by eigenvectors and eigenvalues."""
    return BlockMetric(factors.operator.function(lambda values: values), report, factors.num_examples)


def _bases(metric: BlockMetric) -> Bases:
    pairs = zip(metric.operator.places, metric.operator.blocks, strict=True)
    return {place: (block.input_basis, block.output_basis) for place, block in pairs if isinstance(block, EigenBlock)}


def values_in(basis: AbstractBlock, block: Any) -> Array:
    """The diagonal of a block in the eigenvectors of another."""
    if not isinstance(basis, EigenBlock) or isinstance(block, EigenBlock):
        return block.values
    if isinstance(block, KroneckerBlock):
        A, B = _rotated(basis.input_basis, block.A), _rotated(basis.output_basis, block.B)
        return A[:, :, None] * B[:, None, :]
    return _rotated(basis.input_basis, block.matrix[:, None])[:, :, None]


def _rotated(basis: Factor, factor: Factor) -> Float[Array, "g d"]:
    r"""The diagonal of $Q^\top F Q$."""
    return jnp.einsum("gbij,gbik,gbkj->gbj", basis, factor, basis).reshape(len(basis), -1)
