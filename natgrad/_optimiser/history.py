"""What the losses of a run tell about the next one: how much of it is rounding, and whether it is out of the
ordinary."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool

from natgrad._types import Scalar

# How many times its usual spread a loss has to be above its mean for the last step to be looked at again.
SUSPICIOUS = 3.0
# Of the running averages.
DECAY = 0.9


class History(NamedTuple):
    """Whether there was a sound step yet; the loss of the first; and running averages of the loss and of its spread."""

    is_started: Bool[Array, ""]
    first: Scalar
    mean: Scalar
    spread: Scalar

    @classmethod
    def empty(cls) -> "History":
        zero = jnp.zeros(())
        return cls(jnp.array(False), zero, zero, zero)

    def rounding(self, loss: Scalar) -> Scalar:
        """How much a loss may rise by rounding alone: relative to itself, and where it vanishes, as squares do, to what
        it was at first."""
        eps = jnp.finfo(loss.dtype).eps
        return 10 * eps * jnp.abs(loss) + 100 * eps**2 * jnp.abs(self.first).astype(loss.dtype)

    def is_suspicious(self, loss: Scalar) -> Bool[Array, ""]:
        """Whether the loss is far above its mean: by its batch, or because the last step raised it so."""
        return self.is_started & self.is_far_above(loss, self.mean)

    def is_far_above(self, loss: Scalar, other: Scalar) -> Bool[Array, ""]:
        own = loss.astype(self.mean.dtype)
        return own > other.astype(own.dtype) + SUSPICIOUS * self.spread + self.rounding(loss).astype(own.dtype)

    def with_loss(self, loss: Scalar, is_sound: Bool[Array, ""]) -> "History":
        """The history with the loss of one more step, if that was sound."""
        own = jnp.where(is_sound, loss.astype(self.mean.dtype), self.mean)
        is_first = is_sound & ~self.is_started
        averaged = lambda old, new: jnp.where(is_sound, DECAY * old + (1 - DECAY) * new, old)
        return History(
            self.is_started | is_sound,
            jnp.where(is_first, own, self.first),
            jnp.where(is_first, own, averaged(self.mean, own)),
            # At first, for want of more, as large as the loss.
            jnp.where(is_first, jnp.abs(own), averaged(self.spread, jnp.abs(own - self.mean))),
        )
