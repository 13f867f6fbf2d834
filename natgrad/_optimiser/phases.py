"""What one phase of a step hands to the next: measure, solve, propose, judge, conclude."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from natgrad._optimiser.cost import CostPoint
from natgrad._optimiser.damping import DampingMatrix
from natgrad._optimiser.guard import Conclusion, Soundness, Trial
from natgrad._optimiser.info import STEP_RESULTS, Info, Quantity
from natgrad._optimiser.momentum import Flat
from natgrad._optimiser.step.base import Expansion
from natgrad._optimiser.structure.base import Direction


class Measurement(NamedTuple):
    """A batch after its forward and backward pass: the model on it, the cost around the parameters (without damping
    yet), the damping matrix but for its strength, and whether the batch can be used and its loss is out of the
    ordinary."""

    cost_point: CostPoint
    expansion: Expansion
    matrix: DampingMatrix
    unflatten: Callable[[Flat], PyTree]
    soundness: Soundness
    is_suspicious: Bool[Array, ""]


class NaturalStep(NamedTuple):
    """The natural gradient (downhill) and how it was found, the damping (its diagonal and its strength), and the new
    states of structure and damping; `is_known` says whether the state of the damping is to be kept."""

    direction: Direction
    natural: Flat
    entries: Flat
    strength: Any
    structure: PyTree
    damping: PyTree
    is_known: Bool[Array, ""] | bool


def describe(solved: NaturalStep, trial: Trial, conclusion: Conclusion) -> Info:
    """What happened in a step."""
    loss, proposal, soundness = trial.expansion.loss, trial.proposal, trial.soundness

    def quantity(value):
        return Quantity.of(value, loss.dtype).known_if(soundness.is_usable)

    loss_after = quantity(proposal.loss_after)
    return Info(
        loss=loss,
        loss_after=loss_after,
        damping=jnp.asarray(0.0 if solved.strength is None else solved.strength, loss.dtype),
        step_size=jnp.asarray(proposal.step_size, loss.dtype),
        momentum=jnp.asarray(proposal.momentum, loss.dtype),
        predicted_decrease=quantity(proposal.predicted_decrease),
        actual_decrease=Quantity.of(loss - loss_after.value, loss.dtype, loss_after.is_known),
        divergence=quantity(proposal.divergence),
        predicted_divergence=quantity(proposal.predicted_divergence),
        cosine=quantity(proposal.cosine),
        accepted=conclusion.is_accepted,
        result=_result(solved.direction, soundness, conclusion),
        failures=solved.direction.failures,
        aux=None,
    )


def _result(direction: Direction, soundness: Soundness, conclusion: Conclusion) -> Any:
    """What came of a step, in words."""
    results: Any = STEP_RESULTS
    unsolved = [results.not_positive_definite, results.inaccurate, results.not_finite, results.inner_diverged]
    is_unsolved = functools.reduce(jnp.logical_or, [direction.result == result for result in unsolved])
    rejected = results.where(is_unsolved, direction.result, results.rejected)
    rejected = results.where(soundness.is_finite, rejected, results.restored)
    rejected = results.where(conclusion.is_given_up, results.too_many_rejections, rejected)
    rejected = results.where(soundness.is_coupled, results.coupled, rejected)
    rejected = results.where(soundness.is_valid, rejected, results.invalid_batch)
    return results.where(conclusion.is_accepted, direction.result, rejected)
