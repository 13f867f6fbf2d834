from typing import NamedTuple

import jax.numpy as jnp

from natgrad._check import caller, check_number, public
from natgrad._optimiser.damping.base import AbstractDamping
from natgrad._types import Scalar


class LevenbergMarquardtState(NamedTuple):
    strength: Scalar
    minimum: Scalar
    maximum: Scalar


class LevenbergMarquardt(AbstractDamping):
    r"""Damping that follows how well steps are predicted: every so many steps the decrease of the loss is compared with
    that of the quadratic model, and damping falls by $\omega = $ `decay`$^{every}$ if their ratio is above `high`,
    rises by $1/\omega$ if it is below `low`. A rejected step raises it by `growth` at once.

    **Arguments:**

    - `initial`: where to start. By default at the mean eigenvalue of the metric of the first batch, which needs no
      tuning since it has the units of the metric.
    - `minimum`, `maximum`: where to stop. By default at the part of the mean eigenvalue that is lost in rounding, and
      at that of which the mean eigenvalue is lost.
    - `shape`, `multipliers`: as for `ConstantDamping`.
    """

    initial: float | None = None
    decay: float = 0.9
    every: int = 5
    low: float = 0.25
    high: float = 0.75
    growth: float = 4.0
    minimum: float | None = None
    maximum: float | None = None

    @public
    def __check_init__(self):
        if self.initial is not None:
            hint = "(from 0 no factor leads away; use `ConstantDamping(0.0)` for none)"
            check_number(self.initial, f"`initial` {hint}", above=0)
        for name in ("minimum", "maximum"):
            if getattr(self, name) is not None:
                check_number(getattr(self, name), f"`{name}`", least=0)
        check_number(self.decay, "`decay`", above=0, below=1)
        check_number(self.growth, "`growth`", above=1)
        check_number(self.high, "`high`")
        check_number(self.low, "`low`, which is less than `high`,", below=self.high)
        if not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"{caller()} needs `every` to be a whole number of at least 1, but got {self.every}.")

    def init(self):
        return LevenbergMarquardtState(jnp.zeros(()), jnp.zeros(()), jnp.zeros(()))

    def start(self, state, mean_eigenvalue):
        mean = mean_eigenvalue.astype(state.strength.dtype)
        given = lambda value, default: default if value is None else jnp.asarray(value, mean.dtype)
        rounding = jnp.finfo(mean.dtype).eps
        minimum, maximum = given(self.minimum, rounding * mean), given(self.maximum, mean / rounding)
        return LevenbergMarquardtState(jnp.clip(given(self.initial, mean), minimum, maximum), minimum, maximum)

    def strength(self, state, steps):
        return state.strength

    def update(self, state, outcome):
        omega = self.decay**self.every
        predicted, after = outcome.predicted_decrease, outcome.loss_after
        # Near the minimum both decreases are rounding, and their ratio says nothing.
        is_told = predicted.is_known & after.is_known & (predicted.value > outcome.rounding)
        ratio = (outcome.loss - after.value) / jnp.where(is_told, predicted.value, 1.0)
        is_told &= jnp.isfinite(ratio) & self.wants_loss_after(outcome.steps)
        factor = jnp.where(ratio > self.high, omega, jnp.where(ratio < self.low, 1 / omega, 1.0))
        factor = jnp.where(outcome.is_rejected, self.growth, jnp.where(is_told, factor, 1.0))
        strength = jnp.clip(factor.astype(state.strength.dtype) * state.strength, state.minimum, state.maximum)
        return state._replace(strength=strength)

    def wants_loss_after(self, steps):
        return (steps + 1) % self.every == 0

    @property
    def is_adaptive(self):
        return True

    @property
    def needs_mean(self):
        return True
