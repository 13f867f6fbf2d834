from typing import Any, NamedTuple

import jax.numpy as jnp

from natgrad._optimiser.momentum import Vector
from natgrad._optimiser.step.base import AbstractStep, Proposal, check_positive, dot, scheduled
from natgrad._types import Scalar


class Averages(NamedTuple):
    """Running means of gradients and of natural gradients, the sum of their weights, and what batches said of the means
    before them: how fast the loss falls along the direction, and how curved it is."""

    gradient: Vector
    direction: Vector
    weight: Scalar
    slope: Scalar
    curvature: Scalar


class CrossValidated(AbstractStep):
    r"""For small batches: go along the natural gradient averaged over batches, as far as new batches say.

    A batch cannot tell how much of its own gradient $g_t$ is noise. Of the average $m_{t-1}$ of earlier natural
    gradients it can, having no part in it: in expectation, the loss along $\alpha m_{t-1}$ falls with slope $g_t^\top
    m_{t-1}$ and has curvature $\bar g_{t-1}^\top m_{t-1} = m_{t-1}^\top(G + D)\,m_{t-1}$. The step size $\alpha$ is the
    ratio of their running sums, between 0 and 1. So steps get shorter as noise takes over, with no schedule; the first
    batch, which has none before it, is only looked at.

    **Arguments:**

    - `decay`: of all averages.
    - `radius`: the most that a step may move the outputs, in units of $\frac12 d^\top(G + D)\,d$; a number or a
      schedule from optax.
    """

    decay: float = 0.9
    radius: Any = 2e-2

    def __check_init__(self):
        check_positive(self.radius, "radius", "`CrossValidated`")
        if not 0 <= self.decay < 1:
            raise ValueError(f"`CrossValidated` needs a `decay` from 0 to below 1, but got {self.decay}.")

    def init(self, params):
        zero = jnp.zeros((), params.dtype)
        return Averages(jnp.zeros_like(params), jnp.zeros_like(params), zero, zero, zero)

    def propose(self, context):
        old: Averages = context.memory
        slope = self.decay * old.slope - dot(context.gradient, old.direction)
        curvature = self.decay * old.curvature - dot(old.gradient, old.direction)
        weight = self.decay * old.weight + 1
        gradient = old.gradient + (context.gradient - old.gradient) / weight
        direction = old.direction + (context.direction - old.direction) / weight
        wanted = jnp.clip(slope / jnp.where(curvature > 0, curvature, 1.0), 0.0, 1.0)
        half = jnp.maximum(-dot(gradient, direction), 0.0) / 2
        longest = jnp.sqrt(scheduled(self.radius, context.steps) / jnp.where(half > 0, half, 1.0))
        size = jnp.where(curvature > 0, jnp.where(half > 0, jnp.minimum(wanted, longest), wanted), 0.0)
        size = size.astype(direction.dtype)
        return Proposal(
            size * direction,
            size,
            0.0,
            predicted_divergence=size**2 * half,
            memory=Averages(gradient, direction, weight, slope, curvature),
        )

    @property
    def is_for_small_batches(self):
        return True

    @property
    def averages(self):
        return True
