"""Metrics made of blocks, and their inverses: every function of the metric is one of its blocks."""

from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from natgrad import _tree
from natgrad._block import damped, factor
from natgrad._block.base import AbstractBlock, Eigen, reciprocal
from natgrad._block.entries import BlockEntries
from natgrad._block.stacks import eigen
from natgrad._block.structure_report import StructureReport
from natgrad._check import check_damping, public, real_array
from natgrad._metric.base import AbstractMetric
from natgrad._model import check_structure, finite
from natgrad._types import Matrix, Scalar
from natgrad._vector import Covector, Vector, untyped


class Blocks(eqx.Module):
    """Symmetric operators on parts of a tree, which together cover it once."""

    blocks: tuple[AbstractBlock, ...]
    places: tuple[BlockEntries, ...] = eqx.field(static=True)
    structure: tuple = eqx.field(static=True)

    @public
    def mv(self, v: PyTree) -> PyTree:
        return _tree.cast_like(self._mapped(lambda block, part: block.mv(part), v), v)

    def diagonal(self) -> PyTree:
        return self._mapped(lambda block, _: block.diagonal(), self.zeros())

    def traces(self) -> Float[Array, " matrices"]:
        """The traces of the matrices of all blocks."""
        return factor.traces([matrix for block in self.blocks for matrix in block.matrices()])

    def trace(self, traces: Float[Array, " matrices"] | None = None) -> Scalar:
        """The trace, from those of the matrices of all blocks if they are known."""
        others = [jnp.sum(block.diagonal()) for block in self.blocks if not block.is_product]
        if len(others) == len(self.blocks):
            return _tree.sum_leaves(others)
        return _tree.sum_leaves([_product_traces(self.blocks, self.traces() if traces is None else traces), *others])

    def as_matrix(self) -> Matrix:
        flat = _tree.flatten(self.zeros())[0]
        matrix = jnp.zeros((flat.size, flat.size), flat.dtype)
        for block, rows in zip(self.blocks, self.rows(), strict=True):
            matrix = matrix.at[rows[:, :, None], rows[:, None, :]].set(block.as_matrix().astype(flat.dtype))
        return matrix

    def rows(self) -> list[Array]:
        """For every block, which rows of the dense matrix its groups cover, in order."""
        leaves = self.structure[0]
        ends = np.cumsum([_tree.size(leaf) for leaf in leaves])
        numbers = [
            jnp.arange(end - _tree.size(leaf), end).reshape(leaf.shape) for end, leaf in zip(ends, leaves, strict=True)
        ]
        return [place.gather(numbers, int).reshape(place.block[0], -1) for place in self.places]

    def function(self, f: Callable[[Any], Any]) -> "Blocks":
        """The same eigenvectors with `f` of the eigenvalues, which are not negative."""
        return self.replaced([block.function(eigen, f) for block, eigen in self._eigen()])

    def eigenvalues(self) -> list[Array]:
        return [block.eigenvalues(eigen) for block, eigen in self._eigen()]

    def with_unit_diagonal(self) -> tuple["Blocks", PyTree]:
        """The operator in units in which all parameters count the same, and the unit of every parameter."""
        roots = jax.tree.map(jnp.sqrt, self.diagonal())
        return self.replaced([block.with_unit_diagonal() for block in self.blocks]), jax.tree.map(reciprocal, roots)

    def replaced(self, blocks: Sequence[AbstractBlock]) -> "Blocks":
        return Blocks(tuple(blocks), self.places, self.structure)

    @property
    def struct(self) -> PyTree:
        leaves, treedef = self.structure
        return jax.tree.unflatten(treedef, leaves)

    def zeros(self) -> PyTree:
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), self.struct)

    def _eigen(self) -> list[tuple[AbstractBlock, list[Eigen]]]:
        return [(block, [eigen(matrix) for matrix in block.matrices()]) for block in self.blocks]

    def _mapped(self, function: Callable, v: PyTree) -> PyTree:
        """`function(block, part)` of every block, put together in single precision at least."""
        leaves, treedef = jax.tree.flatten(v)
        wide = [jnp.zeros(leaf.shape, _tree.wide(leaf)) for leaf in leaves]
        for block, place in zip(self.blocks, self.places, strict=True):
            place.scatter(function(block, place.gather(leaves, block.dtype)), wide)
        return jax.tree.unflatten(treedef, wide)


def _product_traces(blocks: Sequence[AbstractBlock], traces: Float[Array, " matrices"]) -> Scalar:
    r"""$\sum\operatorname{tr}A\,\operatorname{tr}B$ over products and their groups, from the traces of all matrices."""
    layout = damped.factor_index(blocks)
    sums = layout.summed(traces)
    # The first factors of products stand before the second.
    first = np.flatnonzero(layout.other > np.arange(len(layout.other)))
    return jnp.sum(sums[first] * sums[layout.other[first]])


class BlockMetric(AbstractMetric):
    """A metric of which only blocks are kept, each in a structure that is cheap to store and to invert.

    `report()` says what structure every parameter got, and why.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0], [2.0]])
    metric = ng.kfac(lambda w, x: x @ w, ng.Euclidean(), jnp.zeros((1, 1)), x)
    assert jnp.allclose(metric.mv(jnp.ones((1, 1))), 2.5)
    assert metric.report().rows[0].structure == "kronecker"
    ```
    """

    operator: Blocks
    _report: StructureReport = eqx.field(static=True)
    # How many examples it is an average of; of an average of metrics, the average number.
    num_examples: Float[Array, ""]

    def report(self) -> StructureReport:
        """The structure of every parameter: a table when printed, a mapping by path for programs."""
        return self._report

    @public
    def inverse(
        self, damping: Any = 0.0, *, factored: bool = False, previous: "BlockInverse | None" = None
    ) -> "BlockInverse":
        r"""The inverse $(G + \lambda I)^{-1}$ as an operator from covectors to vectors.

        **Arguments:**

        - `damping`: $\lambda$. Zero gives the pseudo-inverse.
        - `factored`: whether to damp the factors of a Kronecker product instead of the product,
          $(A + \pi\sqrt\lambda I) \otimes (B + \frac{\sqrt\lambda}\pi I)$, which needs no eigenvectors and is several
          times faster, but is the inverse of more than $G + \lambda I$.
        - `previous`: an inverse of the same model, whose blocks are kept where the new ones are not finite.

        `BlockInverse.failures` counts the blocks for which anything had to be done."""
        is_undamped = check_damping(damping)
        damping = real_array(damping, "`BlockMetric.inverse`: `damping`")
        if previous is not None and not isinstance(previous, BlockInverse):
            raise TypeError(
                f"`BlockMetric.inverse` needs `previous` to be a `BlockInverse`, but got `{type(previous).__name__}`."
            )
        return _inverse(self.operator, damping, factored and not is_undamped, previous)

    @public
    def logdet(self, damping: Any = 0.0) -> Scalar:
        r"""$\log\det(G + \lambda I)$; minus infinity for a singular metric without damping."""
        check_damping(damping)
        return _logdet(self.operator, real_array(damping, "`BlockMetric.logdet`: `damping`"))

    def sqrt(self) -> "BlockMetric":
        r"""The symmetric root $G^{1/2}$, with the same blocks."""
        return BlockMetric(_sqrt(self.operator), self._report, self.num_examples)

    def _mv(self, v):
        return self.operator.mv(v)

    def as_matrix(self):
        return self.operator.as_matrix()

    def diagonal(self):
        return self.operator.diagonal()

    def trace(self):
        return self.operator.trace()

    @property
    def root_size(self):
        return self.in_size()

    def root_mv(self, v):
        return _tree.flatten(self.sqrt().operator.mv(v))[0]

    def root_transpose_mv(self, u):
        return self.sqrt().operator.mv(self._unflatten(u))

    def in_structure(self):
        return self.operator.struct


class BlockInverse(eqx.Module):
    """The inverse of a damped metric, block by block.

    `failures` counts the blocks that could not be inverted as they are. A block with a factor next to which its damping
    is rounding is inverted with the least damping that is not. In place of a block that is not finite stands the block
    of the previous inverse, if there was one.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0], [2.0]])
    inverse = ng.kfac(lambda w, x: x @ w, ng.Euclidean(), jnp.zeros((1, 1)), x).inverse(damping=0.5)
    assert jnp.allclose(inverse.mv(jnp.ones((1, 1))), 1 / 3) and inverse.failures == 0
    ```
    """

    operator: Blocks
    failures: Int[Array, ""]

    @public
    def mv(self, covector: PyTree) -> PyTree:
        r"""$(G + \lambda I)^{-1}g$. A `Covector` gives a `Vector`."""
        tree, typed = untyped(covector, Covector)
        check_structure(self.operator.struct, tree, "`BlockInverse.mv`")
        product = self.operator.mv(tree)
        return Vector(product) if typed else product

    def as_matrix(self) -> Matrix:
        return self.operator.as_matrix()


@eqx.filter_jit
def _inverse(operator: Blocks, damping: Scalar, factored: bool, previous: BlockInverse | None) -> BlockInverse:
    if factored:
        inverses = damped.invert(operator.blocks, jnp.broadcast_to(damping, (len(operator.blocks),)))
        new, is_good, is_finite = operator.replaced(inverses.blocks), inverses.is_definite, inverses.is_finite
    else:
        new = operator.function(lambda s: reciprocal(s + damping.astype(s.dtype)))
        is_good = is_finite = jnp.stack([finite(block).holds for block in new.blocks])
    failures = jnp.sum(~(is_good & is_finite))
    if previous is None:
        return BlockInverse(new, failures)
    if jax.tree.structure(previous.operator) != jax.tree.structure(new):
        raise ValueError(
            "`BlockMetric.inverse` got a `previous` inverse of another model, or in another form: use the same metric "
            "and the same `factored` for both."
        )
    kept = [
        jax.tree.map(lambda a, b: jnp.where(good, a, b), block, old)  # noqa: B023
        for good, block, old in zip(is_finite, new.blocks, previous.operator.blocks, strict=True)
    ]
    return BlockInverse(new.replaced(kept), failures + previous.failures)


@eqx.filter_jit
def _logdet(operator: Blocks, damping: Scalar) -> Scalar:
    logs = [jnp.sum(jnp.log(values + damping.astype(values.dtype))) for values in operator.eigenvalues()]
    return _tree.sum_leaves(logs)


@eqx.filter_jit
def _sqrt(operator: Blocks) -> Blocks:
    return operator.function(jnp.sqrt)
