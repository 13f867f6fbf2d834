"""The examples that a model is evaluated on, and how much each of them counts."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from natgrad._check import caller, is_concrete, public
from natgrad._model import example_axes, num_examples
from natgrad._types import Output, Scalar

# One number for every example, or for every position of its output.
Weights = Float[Array, "N ..."]


class Batch(eqx.Module):
    r"""Examples: inputs, targets, weights and masks.

    Accepted in place of `x` by every function that takes a model and data, and in place of `(x, y)` by
    `NaturalGradient`.

    **Arguments:**

    - `x`: inputs, with the examples along the leading axis of every array.
    - `y`: targets, where a loss needs some.
    - `weights`: one number for each example, or for each position of its output. Only their ratios matter: the weight
      of an example is the largest weight among its positions, and weights are scaled to a mean of one over examples.
    - `mask`: for Kronecker factors, zeros at positions that do not count (padding) and ones elsewhere, an array of
      examples by positions, for the weights that are used at as many positions and for outputs that have them. A
      mapping gives parameters masks of their own, by path, and `"z"` the mask of the outputs.
    - `in_axes`: as in `jax.vmap`, where the examples are in `x`: an axis, `None` for arrays that all examples share, or
      a tree of these.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    x, weights = jnp.array([[1.0], [2.0]]), jnp.array([1.0, 0.0])
    batch = ng.Batch(x, weights=weights)  # the second example does not count
    assert jnp.allclose(ng.pullback(lambda w, x: x @ w, ng.Euclidean(), jnp.zeros(1), batch).trace(), 1.0)
    ```
    """

    x: PyTree
    y: PyTree
    weights: Any
    mask: PyTree
    axes: tuple[int | None, ...] = eqx.field(static=True)

    @public
    def __init__(self, x: PyTree, y: PyTree = None, weights: Any = None, *, mask: PyTree = None, in_axes: PyTree = 0):
        if isinstance(x, Batch):
            raise TypeError(
                f"{caller()} needs arrays as `x`, but got a `Batch`: pass its parts, `Batch(x, y, weights)`."
            )
        self.x, self.y, self.mask = x, y, mask
        self.weights = np.asarray(weights) if isinstance(weights, list | tuple) else weights
        self.axes = tuple(example_axes(x, in_axes))

    @property
    def in_axes(self) -> PyTree:
        """The axes of examples, as a tree like the inputs."""
        return jax.tree.unflatten(jax.tree.structure(self.x), self.axes)

    @property
    def size(self) -> int:
        return num_examples(self.x, self.in_axes)

    @property
    def example_weights(self) -> Float[Array, " N"] | None:
        """How much every example counts: as much as its heaviest position."""
        return None if self.weights is None else largest_of_examples(self.weights)

    @property
    def total(self) -> Scalar | float:
        """The sum of the weights of examples."""
        return float(self.size) if self.example_weights is None else jnp.sum(self.example_weights)

    def mean(self, values: Float[Array, " N"]) -> Scalar:
        """The mean over examples, weighted; zero if none of them counts."""
        weights = self.example_weights
        if weights is None:
            return jnp.mean(values)
        weights = at_most_one(weights.astype(values.dtype))
        return jnp.sum(weights * values) * inverse_or_zero(jnp.sum(weights))

    def relative_weights(self) -> Weights | None:
        """The weights, divided so that examples count on average once."""
        if self.weights is None:
            return None
        weights = at_most_one(self.weights)
        return weights * inverse_or_zero(jnp.mean(largest_of_examples(weights)))

    def with_weights(self, weights: Weights | None) -> "Batch":
        return eqx.tree_at(lambda batch: batch.weights, self, weights, is_leaf=lambda leaf: leaf is None)

    def with_targets(self, y: PyTree) -> "Batch":
        return eqx.tree_at(lambda batch: batch.y, self, y, is_leaf=lambda leaf: leaf is None)


def as_examples(x: PyTree) -> Batch:
    """Convert inputs to a `Batch`; refuse concrete weights that are negative, not finite or all zero."""
    batch = x if isinstance(x, Batch) else Batch(x)
    count, weights = batch.size, batch.weights
    if weights is None:
        return batch
    if jnp.shape(weights)[:1] != (count,):
        raise ValueError(
            f"{caller()} needs weights for {count} examples, but got weights of shape {jnp.shape(weights)}."
        )
    if is_concrete(weights) and not _are_weights(np.asarray(weights)):
        raise ValueError(
            f"{caller()} needs weights that are finite and not negative, and not all of them zero. A weight of zero "
            "leaves an example out."
        )
    return batch.with_weights(jnp.asarray(weights, float))


def _are_weights(weights: np.ndarray) -> bool:
    return bool(np.all(np.isfinite(weights) & (weights >= 0)) and np.any(weights > 0))


def refuse_weights(batch: Batch, what: str) -> None:
    """Refuse weights where they have no meaning yet."""
    if batch.weights is not None:
        raise ValueError(
            f"{caller()} does not take weights here. {what} would have to be weighed too. Repeat examples instead, or "
            "leave them out of the batch."
        )


def refuse_mask(batch: Batch) -> None:
    """Refuse a mask where it would do nothing."""
    if batch.mask is not None:
        raise ValueError(
            f"{caller()} got a batch with a `mask`, which only `kfac` and `ekfac` use. Leave positions out by weights "
            "of zero: `Batch(x, weights=mask)`."
        )


def largest_of_examples(weights: Weights) -> Float[Array, " N"]:
    """The largest weight among the positions of every example."""
    return jnp.max(weights.reshape(len(weights), -1), axis=1)


def at_most_one(weights: Weights) -> Weights:
    """Weights in the same ratios, whose sums cannot overflow; NaN if one is negative, where that cannot be refused."""
    # By a power of two: XLA multiplies by one over the largest weight instead of dividing, and on CPUs it has no
    # denormal numbers, so that `weights / max(weights)` is zero for weights of 3e38 (JAX 0.10.1). Reproduced by
    # `test_dividing_by_a_large_number_gives_zero`.
    _, exponent = jnp.frexp(jax.lax.stop_gradient(jnp.max(weights)))
    return jnp.where(jnp.any(weights < 0), jnp.nan, jnp.ldexp(weights, -exponent))


def inverse_or_zero(total: Float[Array, "..."]) -> Float[Array, "..."]:
    """One over a total weight; zero where nothing counts."""
    return jnp.where(total == 0, 0.0, 1 / jnp.where(total == 0, 1.0, total))


def weigh(weights: Array, tree: PyTree, lead: int = 0) -> PyTree:
    """Multiply arrays by weights, whose axes follow `lead` other axes. Entries of weight zero become zero, even if they
    were NaN."""

    def weighed(leaf: Array) -> Array:
        shape = (1,) * lead + weights.shape + (1,) * (leaf.ndim - lead - weights.ndim)
        factors = weights.reshape(shape).astype(leaf.dtype)
        return jnp.where(factors == 0, 0.0, factors * jnp.where(factors == 0, 0.0, leaf))

    return jax.tree.map(weighed, tree)


def check_weights(weights: Array, z: Output, y: PyTree = None) -> None:
    """Refuse weights that do not have a leading shape of the outputs, and of the targets."""
    shapes = {name: [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)] for name, tree in (("z", z), ("y", y))}
    if any(shape[: weights.ndim] != weights.shape for leaf_shapes in shapes.values() for shape in leaf_shapes):
        raise ValueError(
            f"The weights of a batch (or the labels that `ignore_label` marks) have shape {weights.shape}, but outputs "
            f"have {shapes['z']} and targets {shapes['y']}. Weights need one number for each example, or for each "
            "position: the leading axes of outputs and targets."
        )


def with_counted(weights: Array, tree: PyTree) -> PyTree:
    """Replace entries of weight zero by the entry of largest weight, so that the loss is defined there."""
    most = jnp.argmax(weights)

    def filled(leaf: Array) -> Array:
        flat = leaf.reshape(weights.size, *leaf.shape[weights.ndim :])
        return jnp.where(spread(weights > 0, leaf), leaf, jax.lax.stop_gradient(flat[most]))

    return jax.tree.map(lambda leaf: filled(jnp.asarray(leaf)), tree)


def spread(weights: Array, like: Any) -> Array:
    """Weights with as many axes as an array."""
    return weights.reshape(*weights.shape, *(1,) * (jnp.ndim(like) - weights.ndim))
