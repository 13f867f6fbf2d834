"""Algebra of pytrees: inner products, dtypes, flattening, and options by path.

Sums and products are computed in single precision at least, also for parameters in half precision."""

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

from natgrad._check import caller
from natgrad._types import Scalar


def vdot(x: PyTree, y: PyTree) -> Scalar:
    r"""The pairing $\langle x, y\rangle$: the sum of the products of matching entries, over all leaves."""
    products = [
        jnp.sum(at_least_float32(a) * at_least_float32(b))
        for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    ]
    return sum_leaves(products)


def subtract(x: PyTree, y: PyTree) -> PyTree:
    return jax.tree.map(operator.sub, x, y)


def scale(factor: Scalar | float, x: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.asarray(factor, leaf.dtype) * leaf, x)


def add(*trees: PyTree) -> PyTree:
    return jax.tree.map(lambda *leaves: sum(leaves[1:], start=leaves[0]), *trees)


def where(condition: Any, new: PyTree, old: PyTree) -> PyTree:
    """The leaves of `new` where the condition holds, else the leaves of `old`."""
    return jax.tree.map(functools.partial(jnp.where, condition), new, old)


def take(tree: PyTree, index: Any) -> PyTree:
    """An index or a slice of the leading axis of every leaf."""
    return jax.tree.map(operator.itemgetter(index), tree)


def zeros(struct: PyTree) -> PyTree:
    """Zeros with the shapes and dtypes of a tree (or its structure)."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), struct)


def cast_like(x: PyTree, like: PyTree) -> PyTree:
    """Cast every leaf of `x` to the dtype of the matching leaf of `like`."""
    return jax.tree.map(lambda leaf, like_leaf: leaf.astype(like_leaf.dtype), x, like)


def at_least_float32(x: PyTree) -> PyTree:
    """Cast half-precision leaves to single precision."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32) if leaf.dtype.itemsize < 4 else leaf, x)


def wide(x: Any) -> Any:
    """The dtype of an array; single precision for half-precision arrays."""
    return jnp.float32 if x.dtype.itemsize < 4 else x.dtype


def sum_leaves(tree: PyTree) -> Array:
    """The sum of all leaves, which must have one shape, in the widest of their dtypes."""
    return functools.reduce(operator.add, promote(*jax.tree.leaves(tree)))


def unravel_like(like: PyTree) -> Callable[[Array], PyTree]:
    """The map from flat vectors back to trees like `like`."""
    return ravel_pytree(like)[1]


def promote(*trees: PyTree) -> tuple[PyTree, ...]:
    """Cast all leaves of all trees to the widest dtype among them."""
    widest = np.result_type(*(leaf.dtype for leaf in jax.tree.leaves(trees)))
    return jax.tree.map(lambda leaf: leaf.astype(widest), trees)


def block_columns(blocks: list[PyTree]) -> list[PyTree]:
    """Pad trees of columns, which stand along the leading axis of every leaf, so that no two share a column.

    They become the rows of a block-diagonal matrix: each has zeros in the columns of the others."""
    counts = [jax.tree.leaves(block)[0].shape[0] for block in blocks]

    def pad(block: PyTree, position: int) -> PyTree:
        before, after = sum(counts[:position]), sum(counts[position + 1 :])
        return jax.tree.map(lambda x: jnp.pad(x, [(before, after)] + [(0, 0)] * (x.ndim - 1)), block)

    return [pad(block, position) for position, block in enumerate(blocks)]


def names(params: PyTree) -> tuple[str, ...]:
    """The paths of the leaves as messages and options write them: `params['w']`."""
    return tuple("params" + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params))


def structure(tree: PyTree) -> PyTree:
    """The shapes and dtypes of a tree."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(jnp.shape(leaf), leaf.dtype), tree)


def size(tree: PyTree) -> int:
    """How many numbers a tree (or its structure) holds."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def flatten(tree: PyTree) -> tuple[Array, Callable[[Array], PyTree]]:
    """A tree as one vector, and the map from such vectors back to its shapes and dtypes.

    The vector has the widest dtype among the leaves, single precision at least."""
    (wide_leaves,) = promote(at_least_float32(jax.tree.leaves(tree)))
    flat = jnp.concatenate([leaf.reshape(-1) for leaf in wide_leaves]) if wide_leaves else jnp.zeros(0)
    return flat, unflatten_like(tree)


def unflatten_like(tree: PyTree) -> Callable[[Array], PyTree]:
    """The map from flat vectors to trees with the shapes and dtypes of `tree`, which may be a structure."""
    leaves, treedef = jax.tree.flatten(tree)
    ends = np.cumsum([leaf.size for leaf in leaves]).tolist()

    def unflatten(vector: Array) -> PyTree:
        slices = [vector[end - leaf.size : end] for leaf, end in zip(leaves, ends, strict=True)]
        shaped = [entries.reshape(leaf.shape).astype(leaf.dtype) for entries, leaf in zip(slices, leaves, strict=True)]
        return jax.tree.unflatten(treedef, shaped)

    return unflatten


def as_callable(function: Callable) -> Any:
    """A function as a pytree, which can be an argument of a compiled function: modules keep their leaves."""
    return function if isinstance(function, eqx.Module | jax.tree_util.Partial) else jax.tree_util.Partial(function)


Option = TypeVar("Option")


def option_for(options: Mapping[str, Option], name: str) -> Option | None:
    """The option for the parameter at path `name`: of the keys that fit, the longest decides."""
    keys = [key for key in options if fits(key, name)]
    return options[max(keys, key=len)] if keys else None


def fits(key: str, name: str) -> bool:
    """Whether the parameter at path `name` is at or below the path `key`."""
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
