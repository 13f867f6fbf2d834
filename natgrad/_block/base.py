"""Blocks: symmetric operators on a few entries of the parameters, in the form in which they are matrices."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from natgrad._block.entries import BlockEntries, part
from natgrad._point.records import MemoryBudget, SiteRecords
from natgrad._types import Scalar


class Eigen(NamedTuple):
    """Eigenvalues and eigenvectors (in columns) of a stack of symmetric matrices."""

    values: Float[Array, "... k"]
    vectors: Float[Array, "... k k"]


class AbstractBlock(eqx.Module):
    """A symmetric operator on arrays `gdo`, separately for every group `g`: matrices with `d` rows and `o` columns,
    flattened row by row.

    Functions of a block (inverse, root, determinant) go through the `matrices` it is made of, so that those of all
    blocks can be stacked by size and factorised in one call: first `matrices()`, then, with what became of them,
    `function` or `inverted`."""

    @abstractmethod
    def mv(self, v: Float[Array, "g d o"]) -> Float[Array, "g d o"]: ...

    @abstractmethod
    def as_matrix(self) -> Float[Array, "g n n"]: ...

    @abstractmethod
    def diagonal(self) -> Float[Array, "g d o"]: ...

    @abstractmethod
    def matrices(self) -> list[Array]:
        """The symmetric matrices that have to be factorised."""

    @abstractmethod
    def eigenvalues(self, eigen: Sequence[Eigen]) -> Float[Array, "g d o"]:
        """All eigenvalues, from the decompositions of `matrices()`."""

    @abstractmethod
    def function(self, eigen: Sequence[Eigen], f: Callable[[Any], Any]) -> "AbstractBlock":
        """The same eigenvectors with `f` of the eigenvalues, from the decompositions of `matrices()`."""

    @abstractmethod
    def inverted(self, inverses: Sequence[Array], damping: Scalar) -> "AbstractBlock":
        """The inverse of the damped block, from those of the damped `matrices()`."""

    @abstractmethod
    def with_unit_diagonal(self) -> "AbstractBlock":
        r"""$D^{-1/2} F D^{-1/2}$ with $D$ the diagonal: the block in units in which all entries count the same. Entries
        with a zero on the diagonal stay zero."""

    @property
    def is_product(self) -> bool:
        """Whether the block is the product of its two matrices, which then share the damping."""
        return False

    @property
    def factor_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of what is stored."""
        return tuple(stored.shape for stored in jax.tree.leaves(self))

    @property
    def dtype(self) -> Any:
        return jax.tree.leaves(self)[0].dtype


def reciprocal(values: Array) -> Array:
    """One over each value, but zero for zero: the pseudo-inverse."""
    is_zero = values == 0
    return jnp.where(is_zero, 0.0, 1 / jnp.where(is_zero, 1.0, values))


def to_unit_diagonal(matrices: Float[Array, "... k k"]) -> Float[Array, "... k k"]:
    roots = jnp.sqrt(reciprocal(jnp.diagonal(matrices, axis1=-2, axis2=-1)))
    return roots[..., :, None] * matrices * roots[..., None, :]


@dataclass(frozen=True, eq=False)
class AbstractEstimator:
    """A block to be computed: the entries of parameters that it covers, why it is not of a better kind, and whether
    that is less than its parameters should have.

    What depends on cotangents is a sum over their columns; what depends on inputs is computed once, after it."""

    place: BlockEntries
    reason: str
    is_fallback: bool

    @property
    @abstractmethod
    def structure(self) -> str:
        """The name of its kind."""

    @abstractmethod
    def of_cotangents(self, recording: SiteRecords, budget: MemoryBudget) -> Any:
        """Sums over examples and cotangents."""

    def of_inputs(self, recording: SiteRecords, cotangents: Any, budget: MemoryBudget) -> Any:
        """What the block needs beyond the sums over cotangents, which are given."""
        del recording, cotangents, budget
        return ()

    @abstractmethod
    def block(self, inputs: Any, cotangents: Any) -> AbstractBlock:
        """The block, from both, with the sums over cotangents divided by the number of examples."""

    @property
    def leaves(self) -> tuple[int, ...]:
        return tuple(part.leaf for part in self.place.parts)


def column_of(leaf: int, shape: Sequence[int]) -> BlockEntries:
    """All entries of a parameter, in one column."""
    size = int(np.prod(shape, dtype=int))
    return BlockEntries((part(leaf, tuple(shape), np.arange(size, dtype=np.int32).reshape(1, size, 1)),))
