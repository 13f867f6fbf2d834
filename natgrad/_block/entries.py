"""Which entries of which parameters a block acts on, and where in its matrices they stand.

Places are compared by value, so that metrics of the same model have the same structure however often it is traced."""

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

    def numbers_of(self) -> Any:
        return slice(None)


@dataclass(frozen=True)
class EntryNumbers:
    """Some entries of a parameter, by their numbers (the bytes of 32-bit integers)."""

    shape: Shape
    numbers: bytes

    def take(self, leaf: Array) -> Array:
        return leaf.reshape(-1)[self.numbers_of()]

    def put(self, x: Array) -> Array:
        zeros = jnp.zeros(math.prod(self.shape), x.dtype)
        return zeros.at[self.numbers_of()].set(x.reshape(-1)).reshape(self.shape)

    def numbers_of(self) -> Any:
        return np.frombuffer(self.numbers, np.int32)


@dataclass(frozen=True)
class LeafEntries:
    """Entries of one parameter as an array `gdo`."""

    leaf: int
    entries: AxisOrder | EntryNumbers
    block: tuple[int, int, int]


@dataclass(frozen=True)
class BlockEntries:
    """Parts whose rows stand below each other: a weight and its bias, the scale and the shift of units."""

    parts: tuple[LeafEntries, ...]

    def gather(self, leaves: Sequence[Array], dtype: Any) -> Shaped[Array, "g d o"]:
        rows = [part.entries.take(leaves[part.leaf]).reshape(part.block).astype(dtype) for part in self.parts]
        return jnp.concatenate(rows, axis=1) if len(rows) > 1 else rows[0]

    def scatter(self, x: Float[Array, "g d o"], leaves: list[Array]) -> None:
        """Add the entries of `x` to the parameters they belong to."""
        start = 0
        for part in self.parts:
            stop = start + part.block[1]
            added = part.entries.put(x[:, start:stop])
            leaves[part.leaf] = leaves[part.leaf] + added.astype(leaves[part.leaf].dtype)
            start = stop

    @property
    def block(self) -> tuple[int, int, int]:
        groups, _, outputs = self.parts[0].block
        return groups, sum(part.block[1] for part in self.parts), outputs


def part(leaf: int, shape: Shape, numbers: np.ndarray) -> LeafEntries:
    """The entries of a parameter with the given numbers, an array `gdo`."""
    block: Any = numbers.shape
    order = _order(shape, numbers) if numbers.size == math.prod(shape) else None
    if order is not None:
        return LeafEntries(leaf, AxisOrder(tuple(shape), order), block)
    return LeafEntries(leaf, EntryNumbers(tuple(shape), numbers.astype(np.int32).tobytes()), block)


def _order(shape: Shape, numbers: np.ndarray) -> tuple[int, ...] | None:
    """The order of axes that gives the entries their places, if there is one."""
    if not numbers.size or not shape:
        return tuple(range(len(shape)))
    axes = np.arange(numbers.size, dtype=numbers.dtype).reshape(shape)
    flat = numbers.reshape(-1)
    probes = np.linspace(0, flat.size - 1, 7).astype(int)
    for order in itertools.permutations(range(len(shape))):
        moved = axes.transpose(order)
        places = np.unravel_index(probes, moved.shape)
        if np.array_equal(moved[places], flat[probes]) and np.array_equal(moved.reshape(-1), flat):
            return order
    return None
