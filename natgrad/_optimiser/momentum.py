"""What is kept of the last update."""

from typing import Any

import equinox as eqx
from jaxtyping import Array, Float

from natgrad._check import check_number, public

Flat = Float[Array, " P"]


class AbstractMomentum(eqx.Module):
    """How the last update enters the next one."""

    def covector(self, gradient: Flat, last: Flat, added: Any) -> Flat:
        """What the metric is solved for, given what is added to every entry of its diagonal."""
        del last, added
        return gradient

    def coefficient(self, count: Any) -> Any:
        """By how much the last update is added to the new one; `None` if the step rule is to find it."""
        del count
        return 0.0


class NoMomentum(AbstractMomentum):
    """Every step stands for itself."""


class HeavyBall(AbstractMomentum):
    r"""The last update is added again, times `decay`: a number or a schedule from optax. With `None` the step rule
    finds the factor, which `QuadraticModel` can."""

    decay: Any = 0.9

    @public
    def __check_init__(self):
        if self.decay is not None:
            check_number(self.decay, "`decay`", least=0, below=1, schedules=True)

    def coefficient(self, count):
        return self.decay(count) if callable(self.decay) else self.decay


class Spring(AbstractMomentum):
    r"""The update that stays closest to the last one, times `decay`, where the batch says nothing (SPRING):
    $d = \mu d' - (G + \lambda I)^{-1}(g + G \mu d')$, which is $-(G + \lambda I)^{-1}(g - \lambda\mu d')$."""

    decay: Any = 0.99

    @public
    def __check_init__(self):
        check_number(self.decay, "`decay`", least=0, below=1)

    def covector(self, gradient, last, added):
        return gradient - (self.decay * added * last).astype(gradient.dtype)
