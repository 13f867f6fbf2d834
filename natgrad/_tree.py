"""Pytree algebra with no mathematics of ours."""

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from natgrad._check import caller, check_number
from natgrad._types import Scalar


def vdot(x: PyTree, y: PyTree) -> Scalar:
    r"""The pairing $\langle x, y\rangle$: products of matching entries, summed over every leaf.

    Leaves in half precision are summed in single precision."""
    parts = [
        jnp.sum(at_least_float32(a) * at_least_float32(b))
        for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    ]
    return sum_leaves(parts)


def subtract(x: PyTree, y: PyTree) -> PyTree:
    return jax.tree.map(operator.sub, x, y)


def scale(factor: Scalar | float, x: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.asarray(factor, leaf.dtype) * leaf, x)


def add(*trees: PyTree) -> PyTree:
    return jax.tree.map(lambda *leaves: sum(leaves[1:], start=leaves[0]), *trees)


def cast_like(x: PyTree, like: PyTree) -> PyTree:
    """`x` with the dtype of the matching leaf of `like`."""
    return jax.tree.map(lambda leaf, model: leaf.astype(model.dtype), x, like)


def at_least_float32(x: PyTree) -> PyTree:
    """Half-precision leaves in single precision, all others as they are."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype.itemsize < 4 else leaf, x)


def wide(x: Any) -> Any:
    """The dtype of an array, or single precision if that is wider."""
    return jnp.float32 if x.dtype.itemsize < 4 else x.dtype


def sum_leaves(tree: PyTree) -> Array:
    """The sum of all leaves, which have one shape, in the widest of their dtypes."""
    return functools.reduce(operator.add, promote(*jax.tree.leaves(tree)))


def unravel_like(like: PyTree) -> Callable[[Array], PyTree]:
    """The map from flat vectors back to trees like `like`."""
    return ravel_pytree(like)[1]


def promote(*trees: PyTree) -> tuple[PyTree, ...]:
    """The trees with every leaf in the widest dtype among them."""
    widest = np.result_type(*(leaf.dtype for leaf in jax.tree.leaves(trees)))
    return jax.tree.map(lambda leaf: leaf.astype(widest), trees)


def block_columns(blocks: list[PyTree]) -> list[PyTree]:
    """Blocks of columns (along the leading axis of every leaf) side by side: each block keeps its own columns and is
    padded with zeros where those of the others stand."""
    counts = [jax.tree.leaves(block)[0].shape[0] for block in blocks]

    def pad(block: PyTree, position: int) -> PyTree:
        before, after = sum(counts[:position]), sum(counts[position + 1 :])
        return jax.tree.map(lambda x: jnp.pad(x, [(before, after)] + [(0, 0)] * (x.ndim - 1)), block)

    return [pad(block, position) for position, block in enumerate(blocks)]


def names(params: PyTree) -> tuple[str, ...]:
    """The paths of the leaves, as they are written in messages and options."""
    return tuple("params" + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params))


def structure(tree: PyTree) -> PyTree:
    """The shapes and dtypes of a tree."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype), tree)


def size(tree: PyTree) -> int:
    """How many numbers a tree (or its structure) holds."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def flatten(tree: PyTree) -> tuple[Array, Callable[[Array], PyTree]]:
    """A tree as one vector in the widest dtype among its leaves (single precision at least), and the way back to
    the original shapes and dtypes."""
    leaves = jax.tree.leaves(tree)
    (wide,) = promote(at_least_float32(leaves))
    flat = jnp.concatenate([leaf.reshape(-1) for leaf in wide]) if leaves else jnp.zeros(0)
    return flat, unflatten_like(tree)


def unflatten_like(tree: PyTree) -> Callable[[Array], PyTree]:
    """The map from flat vectors to trees with the shapes and dtypes of `tree`, which may be a structure."""
    leaves, treedef = jax.tree.flatten(tree)
    ends = np.cumsum([leaf.size for leaf in leaves]).tolist()

    # By slices, which take less time to trace than `ravel_pytree`.
    def unflatten(vector: Array) -> PyTree:
        own = [jax.lax.slice(vector, (end - leaf.size,), (end,)) for leaf, end in zip(leaves, ends, strict=True)]
        shaped = [part.reshape(leaf.shape).astype(leaf.dtype) for part, leaf in zip(own, leaves, strict=True)]
        return jax.tree.unflatten(treedef, shaped)

    return unflatten


def as_callable(function: Callable) -> Any:
    """A function as a pytree: modules as they are, anything else without leaves."""
    return function if isinstance(function, eqx.Module | jax.tree_util.Partial) else jax.tree_util.Partial(function)


Option = TypeVar("Option")


def numbers_by_path(value: Any, name: str, *, schedules: bool = False) -> dict[str, Any]:
    """Numbers of at least zero for the parameters at or below paths, from one for all or from a mapping."""
    given = {str(path): own for path, own in value.items()} if isinstance(value, Mapping) else {"": value}
    for path, own in given.items():
        where = f"`{name}[{path!r}]`" if isinstance(value, Mapping) else f"`{name}`"
        check_number(own, where, least=0, schedules=schedules)
    return given


def option_for(options: Mapping[str, Option], name: str) -> Option | None:
    """The option with the longest key that fits."""
    keys = [key for key in options if fits(key, name)]
    return options[max(keys, key=len)] if keys else None


def fits(key: str, name: str) -> bool:
    return key in ("", name) or (name.startswith(key) and name[len(key)] in "[.")


def check_paths(keys: Iterable[str], names: Iterable[str], argument: str) -> None:
    """Refuse keys that fit no parameter."""
    names = list(names)
    for key in keys:
        if not any(fits(key, name) for name in names):
            raise ValueError(
                f"{caller()}: there is no parameter at `{key}`, which is a path in `{argument}`. The paths are "
                f"{', '.join(names)}."
            )
