from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad import _tree
from natgrad._block.base import AbstractBlock, AbstractEstimator
from natgrad._block.eigen import EigenBlock
from natgrad._block.entries import BlockEntries
from natgrad._block.factor import Factor
from natgrad._block.kronecker import KroneckerBlock
from natgrad._block.rules import BlockRules, check_blocks
from natgrad._check import as_number, public
from natgrad._metric.block_metric import BlockMetric
from natgrad._metric.estimated_blocks import is_corrected, with_basis
from natgrad._metric.running import RunningAverage, RunningState
from natgrad._optimiser.info import STEP_RESULTS
from natgrad._optimiser.structure.base import AbstractStructure, Direction, check_periods, over_live, where_due
from natgrad._optimiser.structure.factors import (
    FactorEstimate,
    block_damping,
    join_terms,
    measure,
    with_values,
)
from natgrad._types import Scalar


class EKFACState(NamedTuple):
    """The running average of the Kronecker factors; the metric in the eigenvectors of the last refresh, whose values
    are a running average too; and the sum of its weights."""

    average: RunningState
    metric: BlockMetric
    weight: Scalar


class EKFAC(AbstractStructure):
    r"""Eigenvalue-corrected Kronecker factors (see `ekfac`), averaged over steps.

    Eigenvectors of averaged factors, computed now and then, and in them the second moments of gradients, averaged over
    steps. Damping is the damping of the step.

    **Arguments:**

    - `decay`, `refresh_every`, `update_every`, `part`, `num_samples`, `blocks`: as for `KFAC`. Where the eigenvectors
      are refreshed, second moments start from the eigenvalues of the factors.

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
    part: float = eqx.field(static=True)
    num_samples: int = eqx.field(static=True)
    blocks: BlockRules

    @public
    def __init__(
        self,
        decay: Any = 0.95,
        refresh_every: int = 10,
        *,
        update_every: int = 1,
        part: float = 1.0,
        num_samples: int = 1,
        blocks: BlockRules | None = None,
    ):
        self.decay, self.refresh_every, self.update_every = as_number(decay), refresh_every, update_every
        self.part, self.num_samples = part, num_samples
        self.blocks = check_blocks(blocks)
        check_periods(self)

    @property
    def has_sites(self):
        return True

    @property
    def uses_masks(self):
        return True

    def init(self, points, key, damping):
        factors = self._factors(self._measured(points, key))
        metric = _decomposed(factors)
        return EKFACState(RunningAverage(self.decay).init(factors), metric, jnp.zeros(()))

    def update(self, state, points, key, schedule, is_good):
        def new():
            measured = self._measured(points, key)
            factors = self._factors(measured)
            is_new = is_good & jnp.isfinite(factors.trace())
            average = RunningAverage(self.decay).update(state.average, factors, is_good=is_new)
            start = lambda: (_decomposed(RunningAverage(self.decay)._value(average)), average.weight)
            metric, weight = where_due(schedule.is_due(self.refresh_every), start, (state.metric, state.weight))
            return EKFACState(average, *self._corrected(metric, weight, measured, is_good))

        return new() if self.update_every == 1 else where_due(schedule.is_due(self.update_every), new, state)

    def mean_eigenvalue(self, state, points, key):
        factors = RunningAverage(self.decay)._value(state.average)
        return over_live(state.metric.trace(), _tree.flatten(factors.diagonal())[0])

    def direction(self, state, points, covector, damping):
        operator = state.metric.operator
        per_block = block_damping(state.metric, damping)
        inverse = operator.replaced([block.inverted([], per_block[k]) for k, block in enumerate(operator.blocks)])
        return Direction(inverse.mv(covector), STEP_RESULTS.successful, jnp.array(0)), state

    def check(self, damping):
        if damping.is_relative:
            raise ValueError(
                "`EKFAC` cannot be damped relative to the diagonal of the metric, which is not diagonal in its "
                'eigenvectors. Use `shape="identity"`, or `KFAC`.'
            )

    def inspect(self, state):
        state.average.total.report().warn_of_fallbacks()

    def _corrected(
        self, metric: BlockMetric, weight: Scalar, measured: list[FactorEstimate], is_good: Any
    ) -> tuple[BlockMetric, Scalar]:
        """The metric with the second moments of this step, in its eigenvectors, among its values."""
        basis = dict(zip(metric.operator.places, metric.operator.blocks, strict=True))
        in_basis = [
            FactorEstimate(factors.data, [_in_basis(estimator, basis) for estimator in factors.estimators])
            for factors in measured
        ]
        fresh = join_terms(in_basis, [factors.blocks() for factors in in_basis])
        total = self.decay * weight + 1
        kept, part = self.decay * weight / total, 1 / total
        is_good = is_good & jnp.isfinite(fresh.trace())
        mixed = lambda old, new: jnp.where(is_good, kept.astype(old.dtype) * old + part.astype(old.dtype) * new, old)
        pairs: Any = zip(metric.operator.blocks, fresh.operator.blocks, strict=True)
        blocks = [with_values(old, mixed(old.values, values_in(old, new))) for old, new in pairs]
        corrected = BlockMetric(metric.operator.replaced(blocks), metric.report(), metric.num_examples)
        return corrected, jnp.where(is_good, total, weight)

    def _factors(self, measured: list[FactorEstimate]) -> BlockMetric:
        return join_terms(measured, [factors.blocks() for factors in measured])

    def _measured(self, points, key) -> list[FactorEstimate]:
        return measure(points, key, self.blocks, self.num_samples, corrected=True)


def _decomposed(metric: BlockMetric) -> BlockMetric:
    operator = metric.operator.function(lambda values: values)
    return BlockMetric(operator, metric.report(), metric.num_examples)


def _in_basis(estimator: AbstractEstimator, basis: dict[BlockEntries, AbstractBlock]) -> AbstractEstimator:
    block = basis.get(estimator.place)
    if not is_corrected(estimator) or not isinstance(block, EigenBlock):
        return estimator
    return with_basis(estimator, block.input_basis, block.output_basis)


def values_in(basis: AbstractBlock, block: Any) -> Array:
    """The diagonal of a block in the eigenvectors of another."""
    if not isinstance(basis, EigenBlock) or isinstance(block, EigenBlock):
        return block.values
    if isinstance(block, KroneckerBlock):
        A, G = _rotated(basis.input_basis, block.A), _rotated(basis.output_basis, block.G)
        return A[:, :, None] * G[:, None, :]
    return _rotated(basis.input_basis, block.matrix[:, None])[:, :, None]


def _rotated(basis: Factor, factor: Factor) -> Float[Array, "g d"]:
    r"""The diagonal of $Q^\top F Q$."""
    return jnp.einsum("gbij,gbik,gbkj->gbj", basis, factor, basis).reshape(len(basis), -1)
