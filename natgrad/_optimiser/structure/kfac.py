from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree

from natgrad import _tree
from natgrad._block import damped
from natgrad._block.base import AbstractBlock
from natgrad._block.rules import BlockRules, check_blocks
from natgrad._check import as_number, caller, public
from natgrad._metric.block_metric import BlockMetric, Blocks
from natgrad._metric.estimated_blocks import joined
from natgrad._metric.running import RunningAverage, RunningState
from natgrad._optimiser.damping import DampingMatrix
from natgrad._optimiser.info import STEP_RESULTS
from natgrad._optimiser.structure.base import Direction, check_periods, over_live, where_due
from natgrad._optimiser.structure.factored import AbstractFactoredStructure, block_damping


class KFACState(NamedTuple):
    """The metric between steps.

    - `average`, `traces`: running averages of the metric and of the traces of its factors.
    - `inverse`: the inverse of the last refresh, or its eigenvectors; `units`: scale of every parameter in which it is
      stored, with relative damping.
    - `failures`: how often the inverse of a block was not finite; `is_stale`: blocks whose last inversion failed."""

    average: RunningState
    traces: RunningState
    inverse: Blocks
    units: PyTree
    failures: Int[Array, ""]
    is_stale: Bool[Array, " blocks"]


class KFAC(AbstractFactoredStructure):
    r"""Kronecker factors (see `kfac`), averaged over steps, and inverted now and then.

    **Arguments:**

    - `decay`: decay of the running average, default 0.95.
    - `refresh_every`: number of steps that an inverse is used for, default 10. It is computed more often at the start,
      after 1, 2, 4 ... steps, and again after a rejected step.
    - `update_every`: number of steps between two measurements of the factors, default 1.
    - `batch_fraction`: fraction of the batch that the factors are measured on, default 1.0; other examples at every
      step.
    - `stagger`: whether to invert some blocks at every step instead of all at once, so that steps take equal time.
    - `factored`: whether damping is added to the factors, or to their product by way of eigenvectors, which is slower
      but follows the damping between refreshes. Without any damping it is always the latter.
    - `num_samples`: number of cotangents drawn for every example, default 1. Without a key, backward passes are exact.
    - `blocks`: options for the structure of the blocks, default `BlockRules()`.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0], [2.0]])
    w, batch = jnp.zeros((1, 1)), (x, 3 * x)
    opt = ng.NaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), structure=ng.KFAC(refresh_every=20))
    state = opt.init(w, batch)
    print(opt.report(state))
    assert [block.structure for block in opt.report(state).rows] == ["kronecker"]
    ```
    """

    decay: Any
    refresh_every: int = eqx.field(static=True)
    update_every: int = eqx.field(static=True)
    batch_fraction: float = eqx.field(static=True)
    stagger: bool = eqx.field(static=True)
    factored: bool = eqx.field(static=True)
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
        stagger: bool = False,
        factored: bool = True,
        num_samples: int = 1,
        blocks: BlockRules | None = None,
    ):
        self.decay, self.refresh_every, self.update_every = as_number(decay), refresh_every, update_every
        self.batch_fraction, self.num_samples = batch_fraction, num_samples
        self.stagger, self.factored = stagger, factored
        self.blocks = check_blocks(blocks)
        corrected = [path for path, structure in self.blocks.structures if structure == "eigenvalue-corrected"]
        if corrected:
            raise ValueError(
                f"{caller()} keeps no corrected eigenvalues, but {', '.join(f'`{path}`' for path in corrected)} shall "
                'have them. Use `EKFAC`, with `BlockRules(structures={path: "kronecker"})` for other parameters.'
            )
        check_periods(self)

    def init(self, points, key, damping):
        metric = joined(self._estimates(points, key))
        # An inverse by factors has the form of the metric.
        is_same = self._is_factored(damping)
        inverse = metric.operator if is_same else metric.operator.function(lambda values: values)
        units = _tree.at_least_float32(metric.operator.zeros()) if damping.is_relative else None
        return KFACState(
            RunningAverage(self.decay).init(metric),
            RunningAverage(self.decay).init(metric.operator.traces()),
            inverse,
            units,
            jnp.array(0),
            jnp.zeros(len(metric.operator.blocks), bool),
        )

    def update(self, state, points, key, schedule, is_good):
        def new() -> tuple[RunningState, ...]:
            fresh = joined(self._estimates(points, key))
            traces = fresh.operator.traces()
            is_new = is_good & jnp.isfinite(fresh.operator.trace(traces))
            averaged = lambda average, new: RunningAverage(self.decay).update(average, new, is_good=is_new)
            return averaged(state.average, fresh), averaged(state.traces, traces)

        old = state.average, state.traces
        updated = new() if self.update_every == 1 else where_due(schedule.is_due(self.update_every), new, old)
        return state._replace(average=updated[0], traces=updated[1])

    def mean_eigenvalue(self, state, points, key):
        metric = self._average(state)
        return over_live(metric.operator.trace(self._traces(state)), _tree.flatten(metric.diagonal())[0])

    def refresh(self, state, damping, schedule):
        metric = self._average(state)
        per_block = block_damping(metric, damping)
        blocks, units = list(state.inverse.blocks), state.units
        failures, is_stale = state.failures, state.is_stale
        groups = _groups(metric.operator.blocks, self.refresh_every) if self.stagger else [range(len(blocks))]
        for k, group in enumerate(groups):
            old = tuple(blocks[index] for index in group)

            def new(group=group, old=old):
                # Inside, so that the average is formed only when it is inverted.
                operator = self._average(state).operator
                operator, units = operator.with_unit_diagonal() if damping.is_relative else (operator, None)
                group_operator = operator.replaced([operator.blocks[index] for index in group])
                # Known are the traces of all blocks, in the units of the parameters.
                is_known = not self.stagger and not damping.is_relative
                traces = self._traces(state) if is_known else None
                inverses, is_finite = self._inverted(group_operator, per_block[np.array(group)], damping, traces)
                kept = lambda good, a, b: jax.tree.map(lambda a, b: jnp.where(good, a, b), a, b)
                return tuple(map(kept, is_finite, inverses, old)), units, ~is_finite

            due = schedule.is_due(self.refresh_every, k * self.refresh_every // len(groups))
            members = np.array(group)
            inverses, units, failed = where_due(due, new, (old, units, is_stale[members]))
            failures = failures + jnp.where(due, jnp.sum(failed), 0)
            is_stale = is_stale.at[members].set(failed)
            for index, block in zip(group, inverses, strict=True):
                blocks[index] = block
        inverse = state.inverse.replaced(blocks)
        return state._replace(inverse=inverse, units=units, failures=failures, is_stale=is_stale)

    def direction(self, state, points, covector, damping):
        inverse = state.inverse
        if not self._is_factored(damping):
            per_block = block_damping(self._average(state), damping)
            inverse = inverse.replaced([block.inverted([], per_block[k]) for k, block in enumerate(inverse.blocks)])
        scaled = lambda tree: tree if state.units is None else jax.tree.map(_times, tree, state.units)
        vector = scaled(inverse.mv(scaled(covector)))
        results: Any = STEP_RESULTS
        result = results.where(jnp.any(state.is_stale), results.kept_inverse, results.successful)
        return Direction(vector, result, state.failures), state

    def diagonal(self, state, points):
        return self._average(state).diagonal()

    def report(self, state):
        return state.average.total.report()

    def check(self, damping):
        if damping.is_relative and self.stagger:
            raise ValueError(
                "`KFAC(stagger=True)` cannot be damped relative to the diagonal of the metric, whose units all blocks "
                "would have to share. Use one of the two."
            )
        if damping.is_relative and not damping.l2.is_default:
            raise ValueError(
                "`KFAC` cannot add `l2` to a metric that is damped relative to its diagonal: their sum is no Kronecker "
                'product. Use `shape="identity"`, or `Exact`.'
            )

    def _is_factored(self, damping: DampingMatrix) -> bool:
        return self.factored and not damping.is_zero

    def _inverted(
        self, operator: Blocks, per_block: Float[Array, " blocks"], damping: DampingMatrix, traces: Array | None
    ) -> tuple[Sequence[AbstractBlock], Array]:
        """The inverses of damped blocks, or their eigenvectors, and whether they are finite."""
        if self._is_factored(damping):
            inverses = damped.invert(operator.blocks, per_block, traces)
            return inverses.blocks, inverses.is_finite
        blocks = operator.function(lambda values: values).blocks
        is_finite = jnp.stack([jnp.all(jnp.isfinite(block.diagonal())) for block in blocks])
        return blocks, is_finite

    def _average(self, state: KFACState) -> BlockMetric:
        return RunningAverage(self.decay)._value(state.average)

    def _traces(self, state: KFACState) -> Float[Array, " matrices"]:
        return RunningAverage(self.decay)._value(state.traces)


def _times(a: Array, b: Array) -> Array:
    return a * b.astype(a.dtype)


def _groups(blocks: Sequence[AbstractBlock], count: int) -> list[list[int]]:
    """Blocks in at most so many groups of nearly the same cost: the largest first, each to the cheapest group."""
    costs = [sum(float(np.prod(m.shape[:-2])) * m.shape[-1] ** 3 for m in block.matrices()) for block in blocks]
    groups: list[list[int]] = [[] for _ in range(min(count, len(blocks)))]
    for index in np.argsort(costs)[::-1]:
        min(groups, key=lambda group: sum(costs[k] for k in group)).append(int(index))
    return [group for group in groups if group]
