"""Blocks: symmetric operators on a few entries of the parameters, in the form in which they are matrices."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
from jaxtyping import Array, Float

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
    def damped(self, damping: Scalar) -> "AbstractBlock":
        """The block plus damping, in the same form."""

    @abstractmethod
    def inverted(self, inverses: Sequence[Array]) -> "AbstractBlock":
        """The inverse, from those of `matrices()`."""

    @property
    def factor_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of what is stored."""
        return tuple(stored.shape for stored in jax.tree.leaves(self))

    @property
    def dtype(self) -> Any:
        return jax.tree.leaves(self)[0].dtype
