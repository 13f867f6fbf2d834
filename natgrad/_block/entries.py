"""Which entries of which parameters a block acts on, and where they stand in its arrays `gdo`.

All classes compare by value, so that two metrics of one model have the same tree structure, whenever each was traced.
Entries have numbers: their positions in the flattened parameter."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

Shape = tuple[int, ...]


@dataclass(frozen=True)
class AxisOrder:
    """All entries of a parameter, with its axes in another order."""

    shape: Shape
    order: tuple[int, ...]

    def take(self, leaf: Array) -> Array:
        return leaf.transpose(self.order)

    def put(self, x: Array) -> Array:
        moved = x.reshape([self.shape[axis] for axis in self.order])
        return moved.transpose(np.argsort(self.order).tolist())

    def index(self) -> Any:
        """The index of these entries into the flattened parameter."""
        return slice(None)


@dataclass(frozen=True)
class EntryNumbers:
    """Some entries of a parameter, by their numbers. These are bytes of 32-bit integers, which can be compared."""

    shape: Shape
    numbers: bytes

    def take(self, leaf: Array) -> Array:
        return leaf.reshape(-1)[self.index()]

    def put(self, x: Array) -> Array:
        zeros = jnp.zeros(math.prod(self.shape), x.dtype)
        return zeros.at[self.index()].set(x.reshape(-1)).reshape(self.shape)

    def index(self) -> Any:
        """The index of these entries into the flattened parameter."""
        return np.frombuffer(self.numbers, np.int32)


@dataclass(frozen=True)
class LeafEntries:
    """Entries of one parameter as an array `gdo` of shape `block`."""

    leaf: int
    entries: AxisOrder | EntryNumbers
    block: tuple[int, int, int]


@dataclass(frozen=True)
class BlockEntries:
    """The entries of a block. Rows of several parameters stand below each other: weight and bias, scale and shift."""

    parts: tuple[LeafEntries, ...]

    def gather(self, leaves: Sequence[Array], dtype: Any) -> Shaped[Array, "g d o"]:
        """The array of the block, from arrays like the parameters."""
        rows = [part.entries.take(leaves[part.leaf]).reshape(part.block).astype(dtype) for part in self.parts]
        return jnp.concatenate(rows, axis=1) if len(rows) > 1 else rows[0]

    def scatter(self, x: Float[Array, "g d o"], leaves: list[Array]) -> None:
        """Add the array of the block to arrays like the parameters, in place in the list `leaves`."""
        start = 0
        for part in self.parts:
            stop = start + part.block[1]
            summand = part.entries.put(x[:, start:stop])
            leaves[part.leaf] = leaves[part.leaf] + summand.astype(leaves[part.leaf].dtype)
            start = stop

    @property
    def block(self) -> tuple[int, int, int]:
        """The shape `gdo` of the block."""
        groups, _, outputs = self.parts[0].block
        return groups, sum(part.block[1] for part in self.parts), outputs


def leaf_entries(leaf: int, shape: Shape, numbers: np.ndarray) -> LeafEntries:
    """Entries of a parameter of the given shape, by their numbers `gdo`."""
    block: Any = numbers.shape
    order = _find_order(shape, numbers) if numbers.size == math.prod(shape) else None
    if order is not None:
        return LeafEntries(leaf, AxisOrder(tuple(shape), order), block)
    return LeafEntries(leaf, EntryNumbers(tuple(shape), numbers.astype(np.int32).tobytes()), block)


def _find_order(shape: Shape, numbers: np.ndarray) -> tuple[int, ...] | None:
    """The transposition that gives all entries of a parameter in the order of `numbers`; `None` if there is none."""
    if not numbers.size or not shape:
        return tuple(range(len(shape)))
    all_numbers = np.arange(numbers.size, dtype=numbers.dtype).reshape(shape)
    flat = numbers.reshape(-1)
    # Most orders are ruled out by seven entries, without transposing a large array.
    probes = np.linspace(0, flat.size - 1, 7).astype(int)
    for order in itertools.permutations(range(len(shape))):
        transposed = all_numbers.transpose(order)
        probed = transposed[np.unravel_index(probes, transposed.shape)]
        if np.array_equal(probed, flat[probes]) and np.array_equal(transposed.reshape(-1), flat):
            return order
    return None
