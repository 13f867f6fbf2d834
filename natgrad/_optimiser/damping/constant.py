from typing import Any

import jax.numpy as jnp

from natgrad._check import check_number, public
from natgrad._optimiser.damping.base import AbstractDamping


class ConstantDamping(AbstractDamping):
    """Damping of a given strength.

    **Arguments:**

    - `value`: a number, or a schedule from optax (a function of the number of steps). By default the mean eigenvalue of
      the metric of the first batch, times `scale`.
    - `shape`: what the strength multiplies: the `"identity"`, or the `"diagonal"` of the metric, which makes steps
      independent of the units of parameters.
    - `multipliers`: factors for the parameters at or below a path."""

    value: Any = None
    scale: float = 1.0

    @public
    def __check_init__(self):
        if self.value is not None:
            check_number(self.value, "`value`", least=0, schedules=True)
        check_number(self.scale, "`scale`", above=0)

    def init(self):
        return jnp.zeros(()) if self.value is None else ()

    def start(self, state, mean_eigenvalue):
        return self.scale * mean_eigenvalue if self.value is None else state

    def strength(self, state, steps):
        if self.value is None:
            return state
        return self.value(steps) if callable(self.value) else self.value

    @property
    def needs_mean(self):
        return self.value is None
