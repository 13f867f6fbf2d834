"""The batch of a term, from what the user gives to a step."""

from typing import Any

import jax
import jax.numpy as jnp

from natgrad import _tree
from natgrad._model import num_examples
from natgrad._optimiser.objective import AbstractObjective
from natgrad._point.batch import Batch, Weights


def as_batch(data: Any, label: str, objective: AbstractObjective) -> Batch:
    """Inputs, targets and weights, of which those that the objective ignores are zero."""
    if isinstance(data, Batch):
        batch = data
    elif isinstance(data, tuple | list) and len(data) in (2, 3):
        batch = Batch(*data)
    else:
        raise TypeError(
            f"{label} must be `(x, y)`, with `y=None` where there are no targets, or `(x, y, weights)`, or a `Batch`, "
            f"but is `{type(data).__name__}`" + (f" of length {len(data)}." if isinstance(data, tuple | list) else ".")
        )
    if any(axis != 0 for axis in batch.axes):
        raise ValueError(
            f"{label} needs the examples along the leading axis of every array in `x`, but its `in_axes` are "
            f"{batch.axes}. Move the axis in the model, or put arrays that all examples share into the parameters."
        )
    if batch.x is None and batch.weights is not None:
        raise ValueError(f"{label} has no `x`, so that there are no examples to weigh. Leave the weights out.")
    if batch.x is None:
        # A model without data has one example, without an axis for it.
        return Batch(None, jax.tree.map(_with_examples, batch.y))
    count = num_examples(batch.x, label=label)
    for name, part in (("y", batch.y), ("weights", batch.weights), ("mask", batch.mask)):
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
    return batch.with_weights(_counted(batch, objective))


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
