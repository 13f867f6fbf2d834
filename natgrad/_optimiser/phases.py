"""What one phase of a step hands to the next: measure, solve, propose, conclude."""

from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, PyTree

from natgrad._optimiser.damping import DampingMatrix
from natgrad._optimiser.evaluation import Evaluation
from natgrad._optimiser.guard import Soundness
from natgrad._optimiser.momentum import Flat
from natgrad._optimiser.step.base import Expansion
from natgrad._optimiser.structure.base import Direction


class Measurement(NamedTuple):
    """A batch after its forward and backward pass: the model on it, the cost around the parameters (without damping
    yet), the damping matrix but for its strength, and whether the batch can be used and its loss is out of the
    ordinary."""

    evaluation: Evaluation
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
