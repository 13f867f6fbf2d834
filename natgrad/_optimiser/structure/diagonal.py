from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._block.base import reciprocal
from natgrad._check import number
from natgrad._metric.running import RunningAverage, RunningState
from natgrad._optimiser.info import STEP_RESULTS
from natgrad._optimiser.structure.base import AbstractStructure, Direction, check_periods, over_live, where_due


class DiagonalState(NamedTuple):
    average: RunningState


class Diagonal(AbstractStructure):
    """The diagonal of the metric (see `diagonal`), averaged over steps.

    **Arguments:**

    - `decay`: decay of the running average, default 0.95.
    - `update_every`: number of steps between two measurements, default 1.
    - `batch_fraction`: fraction of the batch that the diagonal is measured on, default 1.0; other examples at every
      step.
    - `num_samples`: number of cotangents drawn for every example, default 1. Without a key, backward passes are exact.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0], [2.0]])
    w, batch = jnp.zeros((1, 1)), (x, 3 * x)
    structure, damping, step = ng.Diagonal(decay=0.9), ng.ConstantDamping(0.5), ng.ConstantStep(1.0)
    opt = ng.NaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), structure, damping, step=step)
    w, state, info = jax.jit(opt.step)(w, opt.init(w, batch), batch)
    assert jnp.allclose(w, 7.5 / 3)  # the gradient over the metric of 2.5 with damping
    ```
    """

    decay: Any = number(0.95)
    update_every: int = eqx.field(default=1, static=True)
    batch_fraction: float = eqx.field(default=1.0, static=True)
    num_samples: int = eqx.field(default=1, static=True)

    def __check_init__(self):
        check_periods(self)

    @property
    def has_sites(self):
        return True

    def init(self, points, key, damping):
        return DiagonalState(RunningAverage(self.decay).init(self._measured(points, key)))

    def update(self, state, points, key, schedule, is_good):
        def new() -> RunningState:
            fresh = self._measured(points, key)
            is_new = is_good & jnp.isfinite(jnp.sum(_tree.flatten(fresh)[0]))
            return RunningAverage(self.decay).update(state.average, fresh, is_good=is_new)

        if self.update_every == 1:
            return DiagonalState(new())
        return DiagonalState(where_due(schedule.is_due(self.update_every), new, state.average))

    def mean_eigenvalue(self, state, points, key):
        entries = _tree.flatten(self._entries(state))[0]
        return over_live(jnp.sum(entries), entries)

    def direction(self, state, points, covector, damping):
        flat, unflatten = _tree.flatten(covector)
        entries = _tree.flatten(self._entries(state))[0]
        damped = entries + jnp.asarray(damping.entries(entries), entries.dtype)
        vector = unflatten(flat * reciprocal(damped).astype(flat.dtype))
        return Direction(vector, STEP_RESULTS.successful, jnp.array(0)), state

    def diagonal(self, state, points):
        return self._entries(state)

    def _entries(self, state: DiagonalState) -> PyTree:
        return RunningAverage(self.decay)._value(state.average)

    def _measured(self, points, key) -> PyTree:
        squares = []
        for index, term_point in enumerate(points):
            columns = term_point.columns(key, self.num_samples, index)
            squares.append(_tree.scale(1 / term_point.point.num_examples, term_point.point.power_sum(columns)))
        return _tree.add(*squares)
