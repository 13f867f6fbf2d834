"""A model as a program: of a batch, and of a batch of one example."""

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
    """A model as a function of lists of leaves: parameters, and inputs, with the axes of examples in these."""

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
        """For a batch of one example, whose inputs have no axis of examples."""
        shared_leaves, own = iter(shared), iter(data)
        batch = [next(shared_leaves) if axis is None else jnp.expand_dims(next(own), axis) for axis in self.axes]
        return self(params, batch)

    def split(self, leaves: Sequence[Any]) -> tuple[list[Any], list[tuple[Any, int]]]:
        """The inputs that examples share, and the others with the axes of their examples."""
        pairs = list(zip(leaves, self.axes, strict=True))
        shared = [leaf for leaf, axis in pairs if axis is None]
        return shared, [(leaf, axis) for leaf, axis in pairs if axis is not None]

    @property
    def param_shapes(self) -> list[jax.ShapeDtypeStruct]:
        return [shape_of(leaf) for leaf in jax.tree.leaves(self.params)]


def call_of(model: Callable, params: PyTree, x: PyTree, in_axes: PyTree) -> Call:
    axes = example_axes(x, in_axes) if x is not None else []
    ranks = map(jnp.ndim, jax.tree.leaves(x))
    positive = lambda axis, rank: None if axis is None else axis % rank
    return Call(model, params, x, tuple(map(positive, axes, ranks)))


def compare_programs(call: Call, count: int) -> tuple[PyTree, str]:
    """The shapes of the outputs of a batch, and the primitive by which the model may couple examples, an empty string
    if it cannot. A model that does not work for a batch of one, or works differently there, is refused."""
    leaves = [shape_of(leaf) for leaf in jax.tree.leaves(call.x)]
    batch, whole = jax.make_jaxpr(call, return_shape=True)(call.param_shapes, leaves)
    check_outputs(whole, count)
    if call.x is None:
        return whole, ""
    single_leaves = [shape_of(leaf, axis, 1) for leaf, axis in zip(leaves, call.axes, strict=True)]
    try:
        single, alone = jax.make_jaxpr(call, return_shape=True)(call.param_shapes, single_leaves)
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"{caller()}: the model works on the whole batch but fails on a batch of one example ({reason[0]}). Look "
            "for a hard-coded batch size, and use `x.shape[0]` in its place."
        ) from error
    expected = jax.tree.map(lambda leaf: (1, *leaf.shape[1:]), whole)
    given = jax.tree.map(lambda leaf: leaf.shape, alone)
    if expected != given:
        raise ValueError(
            f"{caller()}: for a batch of one example the output of the model has shape {given} instead of {expected}. "
            "Look for a `squeeze` without its `axis`, or for a hard-coded batch size."
        )
    if count == 1:
        return whole, ""
    axes = [None] * len(call.param_shapes) + list(call.axes)
    return whole, find_coupling(compat.closed_jaxpr(batch), compat.closed_jaxpr(single), axes)


def shape_of(leaf: Any, axis: int | None = None, size: int | None = None) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a leaf, with an axis of another size, or without it."""
    shape = list(jnp.shape(leaf))
    if axis is not None:
        shape[axis : axis + 1] = [] if size is None else [size]
    return jax.ShapeDtypeStruct(tuple(shape), getattr(leaf, "dtype", jnp.result_type(leaf)))
