"""What a block of a metric is computed from, and how."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from natgrad._operator.base import AbstractBlock
from natgrad._operator.place import Place, part
from natgrad._per_example.chunks import Budget
from natgrad._per_example.recording import Recording


@dataclass(frozen=True, eq=False)
class Assignment:
    """A block to be computed: the entries of parameters that it covers, why it is not of a better kind, and whether
    that is less than its parameters should have.

    What depends on cotangents is a sum over their columns; what depends on inputs is computed once, after it."""

    place: Place
    reason: str
    is_fallback: bool

    @property
    @abstractmethod
    def structure(self) -> str:
        """The name of its kind."""

    @abstractmethod
    def of_cotangents(self, recording: Recording, budget: Budget) -> Any:
        """Sums over examples and cotangents."""

    def of_inputs(self, recording: Recording, cotangents: Any, budget: Budget) -> Any:
        """What the block needs beyond the sums over cotangents, which are given."""
        del recording, cotangents, budget
        return ()

    @abstractmethod
    def block(self, inputs: Any, cotangents: Any) -> AbstractBlock:
        """The block, from both, with the sums over cotangents divided by the number of examples."""

    @property
    def leaves(self) -> tuple[int, ...]:
        return tuple(part.leaf for part in self.place.parts)


def column_of(leaf: int, shape: Sequence[int]) -> Place:
    """All entries of a parameter, in one column."""
    size = int(np.prod(shape, dtype=int))
    return Place((part(leaf, tuple(shape), np.arange(size, dtype=np.int32).reshape(1, size, 1)),))
