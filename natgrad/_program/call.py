"""A model as a function of lists of leaves, traced for a whole batch and for a batch of one example.

Every leaf of the inputs has the examples along one of its axes, or none if all examples share it. The two programs
have the same equations if the model treats examples independently, and `compare_programs` checks that they do."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from natgrad._check import caller
from natgrad._model import check_outputs, example_axes
from natgrad._program import compat
from natgrad._program.coupling import find_coupling
from natgrad._types import Output


class Call(NamedTuple):
    """A model as a function of two lists of leaves: its parameters and its inputs.

    `axes` are the axes of the examples in the inputs, counted from the front, `None` for inputs that examples share."""

    model: Callable
    params: PyTree
    x: PyTree
    axes: tuple[int | None, ...]

    def __call__(self, params: list[Any], x: list[Any]) -> Output:
        tree = jax.tree.unflatten(jax.tree.structure(self.params), params)
        if self.x is None:
            return jax.tree.map(lambda z: jnp.asarray(z)[None], self.model(tree))
        return self.model(tree, jax.tree.unflatten(jax.tree.structure(self.x), x))

    def of_one(self, params: list[Any], shared: list[Any], data: list[Any]) -> Output:
        """The outputs of a batch of one example, whose `data` have no axis of examples."""
        shared_leaves, data_leaves = iter(shared), iter(data)
        batch = [
            next(shared_leaves) if axis is None else jnp.expand_dims(next(data_leaves), axis) for axis in self.axes
        ]
        return self(params, batch)

    def split(self, leaves: Sequence[Any]) -> tuple[list[Any], list[tuple[Any, int]]]:
        """Split inputs into those that examples share, and pairs of the others with the axis of their examples."""
        pairs = list(zip(leaves, self.axes, strict=True))
        shared = [leaf for leaf, axis in pairs if axis is None]
        return shared, [(leaf, axis) for leaf, axis in pairs if axis is not None]

    @property
    def param_shapes(self) -> list[jax.ShapeDtypeStruct]:
        return [shape_of(leaf) for leaf in jax.tree.leaves(self.params)]


def call_of(model: Callable, params: PyTree, x: PyTree, in_axes: PyTree) -> Call:
    axes = example_axes(x, in_axes) if x is not None else []
    ranks = map(jnp.ndim, jax.tree.leaves(x))
    from_front = tuple(None if axis is None else axis % rank for axis, rank in zip(axes, ranks, strict=True))
    return Call(model, params, x, from_front)


def compare_programs(call: Call, count: int) -> tuple[PyTree, str]:
    """Trace a model on its batch of `count` examples and on a batch of one, and compare the two programs.

    Returns the shapes of the outputs of the batch, and the primitive by which the model may couple examples: an empty
    string if it cannot. Raises an error if the model fails on a batch of one, or returns other shapes there."""
    leaves = [shape_of(leaf) for leaf in jax.tree.leaves(call.x)]
    batch_program, batch_shapes = jax.make_jaxpr(call, return_shape=True)(call.param_shapes, leaves)
    check_outputs(batch_shapes, count)
    if call.x is None:
        return batch_shapes, ""
    single_leaves = [shape_of(leaf, axis, 1) for leaf, axis in zip(leaves, call.axes, strict=True)]
    try:
        single_program, single_shapes = jax.make_jaxpr(call, return_shape=True)(call.param_shapes, single_leaves)
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"{caller()}: the model works on the whole batch but fails on a batch of one example ({reason[0]}). Look "
            "for a hard-coded batch size, and use `x.shape[0]` in its place."
        ) from error
    expected = jax.tree.map(lambda leaf: (1, *leaf.shape[1:]), batch_shapes)
    actual = jax.tree.map(lambda leaf: leaf.shape, single_shapes)
    if expected != actual:
        raise ValueError(
            f"{caller()}: for a batch of one example the output of the model has shape {actual} instead of {expected}. "
            "Look for a `squeeze` without its `axis`, or for a hard-coded batch size."
        )
    if count == 1:
        return batch_shapes, ""
    axes = [None] * len(call.param_shapes) + list(call.axes)
    return batch_shapes, find_coupling(compat.closed_jaxpr(batch_program), compat.closed_jaxpr(single_program), axes)


def shape_of(leaf: Any, axis: int | None = None, size: int | None = None) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a leaf, where `axis` has another `size` or, with `None`, is left out."""
    shape = list(jnp.shape(leaf))
    if axis is not None:
        shape[axis : axis + 1] = [] if size is None else [size]
    return jax.ShapeDtypeStruct(tuple(shape), getattr(leaf, "dtype", jnp.result_type(leaf)))
