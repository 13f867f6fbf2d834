"""What becomes of a step that was proposed: it is taken, or not, or the one before is taken back."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from natgrad._optimiser.history import History
from natgrad._optimiser.info import STEP_RESULTS, Info
from natgrad._optimiser.momentum import Vector
from natgrad._optimiser.step.base import Context, Proposal, dot
from natgrad._optimiser.structure.base import Direction


class State(NamedTuple):
    """What an optimiser remembers: a tree of arrays, to be passed from step to step."""

    steps: Int[Array, ""]
    structure: PyTree
    damping: PyTree
    rule: PyTree
    # The last update, and the parameters and the update before it, to go back to; all as vectors.
    last: Vector
    before: tuple[Vector, Vector]
    # How many steps were rejected without two in a row that were not, and whether the last one was.
    rejections: Int[Array, ""]
    was_rejected: Bool[Array, ""]
    history: History


def conclude(
    context: Context,
    proposal: Proposal,
    found: Direction,
    state: State,
    is_sound: Bool[Array, ""],
    *,
    strength: Any,
    forgotten: PyTree,
    max_rejections: int,
) -> tuple[Vector, State, Info]:
    """Take the step; or stay; or, where loss or gradient are not sound, go back to where the last step started.

    `strength` is that of the damping, and `forgotten` what the step rule remembers of a step that is not taken."""
    update = proposal.update
    is_accepted = is_sound & proposal.is_accepted & jnp.isfinite(dot(update, update))
    # A step that is accepted may yet be taken back by the next.
    unless_back = jnp.where(state.was_rejected, state.rejections, 0)
    rejections = jnp.where(is_accepted, unless_back, state.rejections + 1)
    can_go_back = ~is_sound & (state.steps > 0)
    now = context.params, state.last
    choose = lambda new, back, stay: jnp.where(is_accepted, new, jnp.where(can_go_back, back, stay))
    after = choose(context.params + update + proposal.beside, state.before[0], context.params)
    last = choose(update, state.before[1], state.last)
    is_new = is_accepted | (state.steps == 0)
    before = tuple(jnp.where(is_new, a, b) for a, b in zip(now, state.before, strict=True))

    number = lambda value: jnp.asarray(jnp.nan if value is None else value, context.loss.dtype)
    results: Any = STEP_RESULTS
    unsolved = [results.not_positive_definite, results.inaccurate, results.not_finite, results.inner_diverged]
    is_unsolved = functools.reduce(jnp.logical_or, [found.result == each for each in unsolved])
    rejected = results.where(is_unsolved, found.result, results.rejected)
    rejected = results.where(is_sound, rejected, results.restored)
    rejected = results.where(rejections > max_rejections, results.too_many_rejections, rejected)
    info = Info(
        loss=context.loss,
        loss_after=number(proposal.loss_after),
        damping=number(strength),
        step_size=number(proposal.step_size),
        momentum=number(proposal.momentum),
        predicted_decrease=number(proposal.predicted_decrease),
        actual_decrease=context.loss - number(proposal.loss_after),
        divergence=number(proposal.divergence),
        predicted_divergence=number(proposal.predicted_divergence),
        cosine=number(proposal.cosine),
        accepted=is_accepted,
        result=results.where(is_accepted, found.result, rejected),
        failures=found.failures,
        aux=None,
    )
    state = state._replace(
        steps=state.steps + 1,
        rule=jax.tree.map(lambda new, old: jnp.where(is_accepted, new, old), proposal.memory, forgotten),
        last=last,
        before=before,
        rejections=rejections,
        was_rejected=~is_accepted,
        history=state.history.with_loss(context.loss, is_sound),
    )
    return after, state, info
