"""Guards a run against divergence: which losses are out of the ordinary, and whether a step is taken, rejected or taken
back."""

import dataclasses
import functools
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from natgrad._optimiser.info import STEP_RESULTS, Info, Quantity
from natgrad._optimiser.momentum import Flat
from natgrad._optimiser.step.base import Expansion, Proposal, dot
from natgrad._optimiser.structure.base import Direction
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


class State(eqx.Module):
    """What an optimiser remembers: a tree of arrays, to be passed from step to step."""

    steps: Int[Array, ""]
    structure: PyTree
    damping: PyTree
    rule: PyTree
    # The last update, and the parameters and the update before it, to go back to; all as vectors.
    last: Flat
    before: tuple[Flat, Flat]
    # How many steps were rejected without two in a row that were not, and whether the last one was.
    rejections: Int[Array, ""]
    was_rejected: Bool[Array, ""]
    history: History

    def replace(self, **changes: Any) -> "State":
        return dataclasses.replace(self, **changes)


class Soundness(NamedTuple):
    """Whether a step may be taken: loss and gradient are finite, and the last step did not make the loss diverge; the
    targets are such that the objectives can have them; the output for an example changes with the rest of its batch."""

    is_finite: Bool[Array, ""]
    is_valid: Bool[Array, ""]
    is_coupled: Bool[Array, ""]

    @property
    def is_sound(self) -> Bool[Array, ""]:
        return self.is_finite & self.is_usable

    @property
    def is_usable(self) -> Bool[Array, ""]:
        """Whether the batch is one to take a step on."""
        return self.is_valid & ~self.is_coupled


def conclude(
    expansion: Expansion,
    proposal: Proposal,
    found: Direction,
    state: State,
    soundness: Soundness,
    *,
    strength: Any,
    forgotten: PyTree,
    max_rejections: int,
) -> tuple[Flat, State, Info]:
    """Take the step; or stay; or, where loss or gradient are not sound, go back to where the last step started. A batch
    on which no step can be taken says nothing of the last step.

    `strength` is that of the damping, and `forgotten` what the step rule remembers of a step that is not taken."""
    update = proposal.update
    is_sound = soundness.is_sound
    is_accepted = is_sound & proposal.is_accepted & jnp.isfinite(dot(update, update))
    # A step that is accepted may yet be taken back by the next.
    unless_back = jnp.where(state.was_rejected, state.rejections, 0)
    rejections = jnp.where(is_accepted, unless_back, state.rejections + 1)
    can_go_back = ~is_sound & soundness.is_usable & (state.steps > 0)
    now = expansion.w, state.last
    choose = lambda new, back, stay: jnp.where(is_accepted, new, jnp.where(can_go_back, back, stay))
    after = choose(expansion.w + update + proposal.beside, state.before[0], expansion.w)
    last = choose(update, state.before[1], state.last)
    is_new = is_accepted | (state.steps == 0)
    before = tuple(jnp.where(is_new, a, b) for a, b in zip(now, state.before, strict=True))

    remembered = lambda new, shorter, old: jnp.where(is_accepted, new, jnp.where(soundness.is_usable, shorter, old))
    quantity = lambda value: Quantity.of(value, expansion.loss.dtype).known_if(soundness.is_usable)
    loss_after = quantity(proposal.loss_after)
    info = Info(
        loss=expansion.loss,
        loss_after=loss_after,
        damping=jnp.asarray(strength, expansion.loss.dtype),
        step_size=jnp.asarray(proposal.step_size, expansion.loss.dtype),
        momentum=jnp.asarray(proposal.momentum, expansion.loss.dtype),
        predicted_decrease=quantity(proposal.predicted_decrease),
        actual_decrease=Quantity.of(expansion.loss - loss_after.value, expansion.loss.dtype, loss_after.is_known),
        divergence=quantity(proposal.divergence),
        predicted_divergence=quantity(proposal.predicted_divergence),
        cosine=quantity(proposal.cosine),
        accepted=is_accepted,
        result=_result(found, soundness, is_accepted, rejections > max_rejections),
        failures=found.failures,
        aux=None,
    )
    state = state.replace(
        steps=state.steps + 1,
        rule=jax.tree.map(remembered, proposal.memory, forgotten, state.rule),
        last=last,
        before=before,
        rejections=rejections,
        was_rejected=~is_accepted,
        history=state.history.with_loss(expansion.loss, is_sound),
    )
    return after, state, info


def _result(found: Direction, soundness: Soundness, is_accepted: Array, is_too_often: Array) -> Any:
    """What came of a step, in words."""
    results: Any = STEP_RESULTS
    unsolved = [results.not_positive_definite, results.inaccurate, results.not_finite, results.inner_diverged]
    is_unsolved = functools.reduce(jnp.logical_or, [found.result == each for each in unsolved])
    rejected = results.where(is_unsolved, found.result, results.rejected)
    rejected = results.where(soundness.is_finite, rejected, results.restored)
    rejected = results.where(is_too_often, results.too_many_rejections, rejected)
    rejected = results.where(soundness.is_coupled, results.coupled, rejected)
    rejected = results.where(soundness.is_valid, rejected, results.invalid_batch)
    return results.where(is_accepted, found.result, rejected)
