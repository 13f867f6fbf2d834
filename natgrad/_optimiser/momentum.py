"""What is kept of the last update."""

from typing import Any

import equinox as eqx
from jaxtyping import Array, Float, Int

from natgrad._check import check_number, number, public

Flat = Float[Array, " P"]


class AbstractMomentum(eqx.Module):
    """How the last update enters the next one: before the solve by `covector`, after it by `coefficient`."""

    def covector(self, gradient: Flat, last: Flat | None, damping: Any) -> Flat:
        """What the metric is solved for, given what damping adds to every entry of its diagonal."""
        del last, damping
        return gradient

    def coefficient(self, steps: Int[Array, ""]) -> Any:
        """By how much the last update is added to the new one, after so many steps; `None` if the step rule is to find
        it."""
        del steps
        return 0.0

    @property
    def uses_last(self) -> bool:
        """Whether the last update is to be stored."""
        return True


class NoMomentum(AbstractMomentum):
    """Every step stands for itself."""

    @property
    def uses_last(self):
        return False


class HeavyBall(AbstractMomentum):
    r"""The last update is added again, times `decay`: a number or a schedule from optax. With `None` the step rule
    finds the factor, which `QuadraticModel` can."""

    decay: Any = number(0.9)

    @public
    def __check_init__(self):
        if self.decay is not None:
            check_number(self.decay, "`decay`", least=0, below=1, schedules=True)

    def coefficient(self, steps):
        return self.decay(steps) if callable(self.decay) else self.decay


class Spring(AbstractMomentum):
    r"""The update that stays closest to the last one, times `decay`, where the batch says nothing (SPRING):
    $d = \mu d' - (G + \lambda I)^{-1}(g + G \mu d')$, which is $-(G + \lambda I)^{-1}(g - \lambda\mu d')$."""

    decay: Any = number(0.99)

    @public
    def __check_init__(self):
        check_number(self.decay, "`decay`", least=0, below=1)

    def covector(self, gradient, last, damping):
        assert last is not None
        return gradient - (self.decay * damping * last).astype(gradient.dtype)
