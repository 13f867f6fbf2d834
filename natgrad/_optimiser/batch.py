"""The examples of a step, and how much each of them counts."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from natgrad import _tree
from natgrad._model import num_examples
from natgrad._optimiser.objective import AbstractObjective
from natgrad._types import Output, Scalar

# One number for every example, or for every position of its output.
Weights = Float[Array, "N ..."]


class Batch(NamedTuple):
    """Inputs, targets and weights of some examples.

    Weights are one number for each example, or for each position of its output. Only their ratios matter: the weight
    of an example is the largest weight among its positions, and weights are scaled to a mean of one over examples."""

    x: PyTree
    y: PyTree = None
    weights: Weights | None = None

    @property
    def size(self) -> int:
        return num_examples(self.x)

    @property
    def example_weights(self) -> Float[Array, " N"] | None:
        """How much every example counts: as much as its heaviest position."""
        return None if self.weights is None else jnp.max(self.weights.reshape(len(self.weights), -1), axis=1)

    @property
    def total(self) -> Scalar | float:
        """The sum of the weights of examples."""
        return float(self.size) if self.example_weights is None else jnp.sum(self.example_weights)

    def mean(self, values: Float[Array, " N"]) -> Scalar:
        """The mean over examples, weighted; zero if none of them counts."""
        weights = self.example_weights
        if weights is None:
            return jnp.mean(values)
        weights = weights.astype(values.dtype)
        return jnp.sum(weights * values) * inverse_or_zero(jnp.sum(weights))

    def relative_weights(self) -> Weights | None:
        """The weights, divided so that examples count on average once."""
        if self.weights is None or self.example_weights is None:
            return None
        return self.weights * inverse_or_zero(jnp.mean(self.example_weights))

    def map(self, function: Callable[[Array], Array]) -> "Batch":
        return Batch(*jax.tree.map(function, tuple(self)))


def inverse_or_zero(total: Float[Array, "..."]) -> Float[Array, "..."]:
    """One over a total weight; zero where nothing counts."""
    return jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1.0), 0.0)


def weigh(weights: Array, tree: PyTree, lead: int = 0) -> PyTree:
    """Arrays that have the axes of the weights after `lead` others, times the weights. What does not count is zero,
    whatever it was."""

    def weighed(leaf: Array) -> Array:
        shape = (1,) * lead + weights.shape + (1,) * (leaf.ndim - lead - weights.ndim)
        own = weights.reshape(shape).astype(leaf.dtype)
        return jnp.where(own > 0, own * jnp.where(own > 0, leaf, 0.0), 0.0)

    return jax.tree.map(weighed, tree)


def as_batch(data: Any, label: str, objective: AbstractObjective) -> Batch:
    """Inputs, targets and weights, of which those that the objective ignores are zero."""
    if not isinstance(data, tuple | list) or len(data) not in (2, 3):
        raise TypeError(
            f"{label} must be `(x, y)`, with `y=None` where there are no targets, or `(x, y, weights)`, but is "
            f"`{type(data).__name__}`" + (f" of length {len(data)}." if isinstance(data, tuple | list) else ".")
        )
    batch = Batch(*data)
    if batch.x is None and batch.weights is not None:
        raise ValueError(f"{label} has no `x`, so that there are no examples to weigh. Leave the weights out.")
    if batch.x is None:
        # A model without data has one example, without an axis for it.
        return Batch(None, jax.tree.map(_with_examples, batch.y))
    count = num_examples(batch.x, label=label)
    for name, part in (("y", batch.y), ("weights", batch.weights)):
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(part)]
        if any(shape[:1] != (count,) for shape in shapes):
            raise ValueError(
                f"{label} has {count} examples in `x`, but `{name}` has shapes {shapes}: every array needs the "
                "examples along its leading axis."
            )
    if len(jax.tree.leaves(batch.weights)) > 1:
        raise TypeError(
            f"{label}: `weights` must be one array, but is {jax.tree.structure(batch.weights)}. Give each term of "
            "`Terms` its own."
        )
    return batch._replace(weights=_counted(batch, objective))


def _counted(batch: Batch, objective: AbstractObjective) -> Weights | None:
    """The weights of a batch, and zeros where the objective ignores a target."""
    weights = batch.weights
    if weights is not None:
        weights = jnp.asarray(weights)
        weights = (
            _tree.at_least_float32(weights) if jnp.issubdtype(weights.dtype, jnp.floating) else weights.astype(float)
        )
    counted = None if batch.y is None else objective.counted(batch.y)
    if counted is None:
        return weights
    if weights is None:
        return counted.astype(float)
    ndim = max(counted.ndim, weights.ndim)
    weights, counted = (x.reshape(*x.shape, *(1,) * (ndim - x.ndim)) for x in (weights, counted))
    return jnp.where(counted, weights, 0.0)


def _with_examples(leaf: Any) -> Any:
    """An array, or its shape, with an axis of one example in front."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype)
    return jnp.asarray(leaf)[None]


def check_weights(weights: Array, z: Output, y: PyTree = None) -> None:
    """Refuse weights that do not have a leading shape of the outputs, and of the targets."""
    shapes = {name: [jnp.shape(leaf) for leaf in jax.tree.leaves(tree)] for name, tree in (("z", z), ("y", y))}
    if any(shape[: weights.ndim] != weights.shape for own in shapes.values() for shape in own):
        raise ValueError(
            f"The weights of a batch (or the labels that `ignore_label` marks) have shape {weights.shape}, but outputs "
            f"have {shapes['z']} and targets {shapes['y']}. Weights need one number for each example, or for each "
            "position: the leading axes of outputs and targets."
        )


def with_counted(weights: Array, tree: PyTree) -> PyTree:
    """Arrays that have the axes of the weights in front, with an entry that counts in place of those that do not: it is
    inside the domain of any loss."""
    most = jnp.argmax(weights)

    def filled(leaf: Array) -> Array:
        flat = leaf.reshape(weights.size, *leaf.shape[weights.ndim :])
        return jnp.where(spread(weights > 0, leaf), leaf, jax.lax.stop_gradient(flat[most]))

    return jax.tree.map(lambda leaf: filled(jnp.asarray(leaf)), tree)


def spread(weights: Array, like: Any) -> Array:
    """Weights with as many axes as an array."""
    return weights.reshape(*weights.shape, *(1,) * (jnp.ndim(like) - weights.ndim))
