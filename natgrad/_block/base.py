"""Blocks and their estimators: symmetric operators on a few entries of the parameters.

A block acts on arrays `gdo`: for every group `g`, a matrix with `d` inputs and `o` outputs, flattened row by row into
`n = d o` entries where a dense matrix is needed."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from natgrad._block.entries import BlockEntries, leaf_entries
from natgrad._point.records import MemoryBudget, SiteRecords
from natgrad._types import Scalar


class Eigen(NamedTuple):
    """Eigenvalues and eigenvectors (in columns) of a stack of symmetric matrices."""

    values: Float[Array, "... k"]
    vectors: Float[Array, "... k k"]


class AbstractBlock(eqx.Module):
    """A symmetric operator on arrays `gdo`, separately for every group `g`.

    Functions of blocks (inverse, root, determinant) are computed in two stages. `matrices()` returns the matrices of
    each block; the matrices of all blocks are stacked by size and factorised in one call (`stacks`). Then `function` or
    `inverted` makes a block from the factorisations."""

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
        """The inverse of the damped block, from the inverses of the damped `matrices()`."""

    @abstractmethod
    def with_unit_diagonal(self) -> "AbstractBlock":
        r"""$D^{-1/2} F D^{-1/2}$ for a block $F$ with diagonal $D$. Entries with a zero on the diagonal stay zero."""

    @property
    def is_product(self) -> bool:
        """Whether the block is the product of its two matrices, which then share the damping."""
        return False

    @property
    def factor_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of the arrays that are stored."""
        return tuple(array.shape for array in jax.tree.leaves(self))

    @property
    def dtype(self) -> Any:
        return jax.tree.leaves(self)[0].dtype


def reciprocal(values: Array) -> Array:
    """One over each value, and zero for zero: the pseudo-inverse of a diagonal matrix."""
    is_zero = values == 0
    return jnp.where(is_zero, 0.0, 1 / jnp.where(is_zero, 1.0, values))


def to_unit_diagonal(matrices: Float[Array, "... k k"]) -> Float[Array, "... k k"]:
    r"""$D^{-1/2} F D^{-1/2}$ for matrices $F$ with diagonals $D$."""
    roots = jnp.sqrt(reciprocal(jnp.diagonal(matrices, axis1=-2, axis2=-1)))
    return roots[..., :, None] * matrices * roots[..., None, :]


@dataclass(frozen=True, eq=False)
class AbstractEstimator:
    """How one block is computed from a batch.

    - `place`: the entries of parameters that the block covers.
    - `reason`: why the block has no better structure; empty if it has the best.
    - `is_fallback`: whether the user should be warned about that.

    Sums over cotangents come first, a few columns of cotangents at a time (`of_cotangents`); then, once, whatever
    depends on inputs (`of_inputs`); then the block."""

    place: BlockEntries
    reason: str
    is_fallback: bool

    @property
    @abstractmethod
    def structure(self) -> str:
        """The name of the structure, as reports print it."""

    @abstractmethod
    def of_cotangents(self, recording: SiteRecords, budget: MemoryBudget) -> Any:
        """Sums over examples and cotangents."""

    def of_inputs(self, recording: SiteRecords, cotangents: Any, budget: MemoryBudget) -> Any:
        """Statistics of the inputs, for a block that needs them; `cotangents` are the means of `of_cotangents`."""
        del recording, cotangents, budget
        return ()

    @abstractmethod
    def block(self, inputs: Any, cotangents: Any) -> AbstractBlock:
        """The block, from `of_inputs` and the mean over examples of `of_cotangents`."""

    @property
    def leaves(self) -> tuple[int, ...]:
        return tuple(part.leaf for part in self.place.parts)


def column_of(leaf: int, shape: Sequence[int]) -> BlockEntries:
    """All entries of a parameter, in one column."""
    size = int(np.prod(shape, dtype=int))
    numbers = np.arange(size, dtype=np.int32).reshape(1, size, 1)
    return BlockEntries((leaf_entries(leaf, tuple(shape), numbers),))
