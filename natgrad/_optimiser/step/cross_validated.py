from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp

from natgrad._optimiser.momentum import Vector
from natgrad._optimiser.step.base import AbstractStep, Proposal, check_positive, dot, scheduled
from natgrad._types import Scalar

# By how much the most that is allowed grows back with every step.
GROWTH = 1.1


class Average(NamedTuple):
    """The running mean of natural gradients with the sum of its weights and its squared length; the running mean of how
    far new batches would go along it, with its weights; and the most that is allowed."""

    direction: Vector
    weight: Scalar
    squared: Scalar
    distance: Scalar
    told: Scalar
    limit: Scalar


class CrossValidated(AbstractStep):
    r"""For small batches: go along the natural gradient averaged over batches, as far as new batches say.

    A batch cannot tell how much of its own gradient $g_t$ is noise. Of the average $m_{t-1}$ of earlier natural
    gradients it can, having no part in it: along $\alpha m_{t-1}$ it finds the slope $g_t^\top m_{t-1}$, where the
    curvature was $m_{t-1}^\top(G_{t-1} + D)\,m_{t-1}$ by the exact metric of the batch before, for one tangent pass.
    The step size $\alpha$ is a running mean of their ratios, between 0 and 1. So steps get shorter as noise takes over,
    with no schedule; the first batch, which has none before it, is only looked at. After a step that is taken back, the
    next ones are shorter.

    **Arguments:**

    - `decay`: of the averages.
    - `patience`: how many times as far to go as is best for the loss right after the step, which in the long run is too
      short: noise averages out over steps, and progress adds up.
    - `radius`: the most that a step may move the outputs of its batch, in units of $\frac12 d^\top(G + D)\,d$; a number
      or a schedule from optax.
    """

    decay: float = eqx.field(default=0.9, converter=float)
    patience: float = 4.0
    radius: Any = 0.5

    def __check_init__(self):
        check_positive(self.radius, "radius", "`CrossValidated`")
        check_positive(self.patience, "patience", "`CrossValidated`")
        if not 0 <= self.decay < 1:
            raise ValueError(f"`CrossValidated` needs a `decay` from 0 to below 1, but got {self.decay}.")

    def init(self, params):
        zero = jnp.zeros((), params.dtype)
        return Average(jnp.zeros_like(params), zero, zero, zero, zero, zero)

    def propose(self, context):
        old: Average = context.memory
        number = lambda value: jnp.asarray(value, old.weight.dtype)
        weight = self.decay * old.weight + 1
        direction = old.direction + (context.direction - old.direction) / weight
        squared = number(context.quadratic(direction).damped[0, 0])

        is_told = old.squared > 0
        ratio = -dot(context.gradient, old.direction) / jnp.where(is_told, old.squared, 1.0)
        told = jnp.where(is_told, self.decay * old.told + 1, old.told)
        change = (jnp.clip(self.patience * ratio, -1.0, 1.0) - old.distance) / jnp.maximum(told, 1.0)
        distance = old.distance + jnp.where(is_told, change, 0.0)

        limit = jnp.where(old.told > 0, jnp.minimum(GROWTH * old.limit, 1.0), 1.0)
        longest = jnp.sqrt(2 * number(scheduled(self.radius, context.steps)) / jnp.where(squared > 0, squared, 1.0))
        size = jnp.clip(distance, 0.0, jnp.minimum(limit, jnp.where(squared > 0, longest, 0.0)))
        return Proposal(
            size * direction,
            size,
            0.0,
            predicted_divergence=size**2 * squared / 2,
            memory=Average(direction, weight, squared, distance, told, limit),
        )

    def rejected(self, memory):
        return memory._replace(limit=memory.limit / 4)

    @property
    def keeps_damping(self):
        return True

    @property
    def averages(self):
        return True
