from typing import Any, NamedTuple

import jax.numpy as jnp

from natgrad._check import check_number, number, public
from natgrad._optimiser.momentum import Flat
from natgrad._optimiser.step.base import AbstractStep, Proposal, dot, scheduled
from natgrad._types import Scalar

# By how much the most that is believed grows back with every step.
GROWTH = 1.1
# An agreement below this is against the average: about as far below zero as noise alone may take it.
AGAINST = -0.25


class Average(NamedTuple):
    """The running mean of natural gradients with the sum of its weights and its squared length; the running mean of how
    new batches agreed with it, with its weights; and the most that is believed of that."""

    direction: Flat
    weight: Scalar
    squared: Scalar
    agreement: Scalar
    told: Scalar
    limit: Scalar


class CrossValidated(AbstractStep):
    r"""For small batches: go along the natural gradient averaged over batches, as far as new batches agree with it.

    A batch cannot tell how much of its own gradient $g_t$ is noise. Of the average $m_{t-1}$ of earlier natural
    gradients it can, having no part in it: noise agrees with nothing, and the cosine of the angle
    $c_t = g_t^\top m_{t-1} \,/\, |g_t|\,|m_{t-1}|$ says how much can be gained that way. The step goes along $m_t$ and
    has the length $|g_t|$ of the natural gradient of the batch times the running mean of `patience` $c_t$, from 0 to
    1. So steps get shorter as noise takes over, with no schedule.

    Lengths of gradients are those of natural gradients in the metric of the structure, lengths of averages are by the
    exact metric of their batch, both damped; the latter takes a tangent pass. The first batch, which has none before
    it, is only looked at. An average that batches speak against is begun anew, and after a step that is taken back the
    next ones are shorter.

    **Arguments:**

    - `decay`: of the averages.
    - `patience`: how many times as far to go as is best for the loss right after the step, which in the long run is too
      short: noise averages out over steps, and progress adds up.
    - `radius`: the most that a step may move the outputs of its batch, in units of $\frac12 d^\top(G + D)\,d$; a number
      or a schedule from optax.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng

    opt = ng.NaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), step=ng.CrossValidated(radius=0.1))
    x = jnp.array([[1.0], [2.0]])
    w, batch = jnp.zeros((1, 1)), (x, 3 * x)
    w, state, info = jax.jit(opt.step)(w, opt.init(w, batch), batch)
    assert jnp.allclose(w, 0.0)  # the first batch is only looked at
    ```
    """

    decay: Any = number(0.9)
    patience: Any = number(4.0)
    radius: Any = number(0.5)

    @public
    def __check_init__(self):
        check_number(self.radius, "`radius`", above=0, schedules=True)
        check_number(self.patience, "`patience`", above=0)
        check_number(self.decay, "`decay`", least=0, below=1)

    def init(self, params):
        zero = jnp.zeros((), params.dtype)
        return Average(jnp.zeros_like(params), zero, zero, zero, zero, zero)

    def propose(self, expansion, search):
        old: Average = search.memory
        number = lambda value: jnp.asarray(value, old.weight.dtype)
        # An average that new batches speak against is begun anew.
        weight = jnp.where(old.agreement < AGAINST, 0.0, self.decay * old.weight) + 1
        direction = old.direction + (search.natural - old.direction) / weight
        model = expansion.quadratic(direction)
        squared = number(model.damped[0, 0])

        # The cosine of the angle between this natural gradient and the average of those before it.
        decrease = number(jnp.maximum(-dot(expansion.gradient, search.natural), 0.0))
        # Without an earlier average (the first batch) or a gradient, there is no angle to learn from.
        is_told = old.squared * decrease > 0
        cosine = -dot(expansion.gradient, old.direction) / jnp.sqrt(jnp.where(is_told, old.squared * decrease, 1.0))
        told = jnp.where(is_told, self.decay * old.told + 1, old.told)
        change = (jnp.clip(self.patience * cosine, -1.0, 1.0) - old.agreement) / jnp.maximum(told, 1.0)
        agreement = old.agreement + jnp.where(is_told, change, 0.0)

        # After a step that was taken back, the limit grows again by and by; before the first angle there was none.
        limit = jnp.where(old.told > 0, jnp.minimum(GROWTH * old.limit, 1.0), 1.0)
        length = jnp.clip(agreement, 0.0, limit) * jnp.sqrt(decrease)
        length = jnp.minimum(length, jnp.sqrt(2 * number(scheduled(self.radius, expansion.steps))))
        size = jnp.where(squared > 0, length / jnp.sqrt(jnp.where(squared > 0, squared, 1.0)), 0.0)
        return Proposal(
            size * direction,
            size,
            0.0,
            predicted_divergence=size**2 * number(model.metric[0, 0]) / 2,
            memory=Average(direction, weight, squared, agreement, told, limit),
        )

    def rejected(self, memory):
        return memory._replace(limit=memory.limit / 4)

    @property
    def keeps_damping(self):
        return True

    @property
    def averages(self):
        return True
