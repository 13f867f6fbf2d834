"""What a model is asked to be: a function of parameters and a batch that treats every example alike."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from natgrad._backend import require_sound
from natgrad._check import Requirement, is_concrete
from natgrad._types import Output


def of_params(model: Callable, x: PyTree, subject: str) -> Callable[[PyTree], Output]:
    """The model as a function of its parameters; one without data counts as a batch of one example."""
    if x is None:
        return lambda params: jax.tree.map(lambda z: jnp.asarray(z)[None], model(params))
    num_examples(x, subject)
    return lambda params: model(params, x)


def num_examples(x: PyTree, subject: str, in_axes: PyTree = 0) -> int:
    if x is None:
        return 1
    leaves = list(zip(jax.tree.leaves(x), example_axes(x, in_axes, subject), strict=True))
    shapes = [jnp.shape(leaf) for leaf, axis in leaves if axis is not None]
    short = any(not -jnp.ndim(leaf) <= axis < jnp.ndim(leaf) for leaf, axis in leaves if axis is not None)
    sizes = set() if short else {jnp.shape(leaf)[axis] for leaf, axis in leaves if axis is not None}
    if len(sizes) != 1:
        where = "leading axis" if in_axes == 0 else f"axis (`in_axes={in_axes}`)"
        raise ValueError(
            f"{subject} needs every array of `x` to have the same {where} of examples, but got shapes {shapes}."
        )
    (count,) = sizes
    if count == 0:
        raise ValueError(f"{subject} got an empty batch, and an average over no examples has no meaning.")
    return count


def example_axes(x: PyTree, in_axes: PyTree, subject: str) -> list[int | None]:
    """The axis of examples in every leaf of `x`, `None` where the examples share it, from a prefix as in `jax.vmap`."""
    leaf = lambda axis: axis is None or isinstance(axis, int)
    try:
        if not all(map(leaf, jax.tree.leaves(in_axes, is_leaf=leaf))):
            raise TypeError("an axis is a number")
        spread = jax.tree.map(lambda axis, part: [axis] * len(jax.tree.leaves(part)), in_axes, x, is_leaf=leaf)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{subject} needs `in_axes` to be an axis, `None`, or a tree of these that begins like `x`, but got "
            f"`{in_axes}` for {jax.tree.structure(x)}."
        ) from error
    return jax.tree.leaves(spread, is_leaf=lambda part: part is None)


def check_params(params: PyTree, subject: str) -> None:
    require_sound()
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise ValueError(f"{subject} got `params` without any array.")
    for path, leaf in leaves:
        dtype: Any = getattr(leaf, "dtype", type(leaf).__name__)
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"{subject} needs parameters that are real floating-point arrays, but "
                f"`params{jax.tree_util.keystr(path)}` is `{dtype}`. Close over it in the model, or pass only the "
                "trainable part of the parameters."
            )


def check_structure(expected: PyTree, given: PyTree, subject: str) -> None:
    """Refuse a tree whose structure or shapes differ from those of the parameters."""
    shapes = [jax.tree.map(lambda leaf: tuple(jnp.shape(leaf)), tree) for tree in (expected, given)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{subject} needs a tree with the structure and shapes of the parameters, {shapes[0]}, but got {shapes[1]}."
        )


def check_outputs(z: PyTree, count: int, subject: str) -> None:
    """Refuse outputs (or their shapes) that are not real numbers with the examples along the leading axis."""
    for leaf in jax.tree.leaves(z):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"{subject}: the output of the model must be real floating-point, but it is `{leaf.dtype}`."
            )
        if leaf.shape[:1] != (count,):
            raise ValueError(
                f"{subject}: the output of the model must have the {count} examples of `x` along its leading axis, but "
                f"its shape is {leaf.shape}. Check for a `squeeze`, a sum over the batch or a missing `jax.vmap`."
            )


def check_examples(model: Callable, params: PyTree, x: PyTree, z: Output, subject: str, in_axes: PyTree = 0) -> None:
    """Refuse a concrete model whose output for an example depends on the rest of the batch."""
    if x is None or not is_concrete((params, x, z)) or jax.tree.leaves(z)[0].shape[0] < 2:
        return
    leaves, treedef = jax.tree.flatten(x)
    axes = example_axes(x, in_axes, subject)
    only = lambda leaf, axis: leaf if axis is None else jax.lax.slice_in_dim(leaf, 0, 1, axis=axis)
    first = [only(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True)]
    alone = model(params, jax.tree.unflatten(treedef, first))
    if not is_concrete(alone):
        return
    _refuse_coupled(alone, z, "the first example changes when the rest of the batch is left out", subject)


def check_independent(model: Callable, params: PyTree, x: PyTree, subject: str) -> None:
    """The same by the first two examples of a batch: whether the second gives the same in another place and company.
    Compiled once; nothing is refused that cannot be run so."""
    shapes = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((params, x)))
    if x is None or shapes or not is_concrete((params, x)) or num_examples(x, subject) < 2:
        return
    of_rows = jax.jit(lambda params, x, rows: model(params, jax.tree.map(lambda leaf: leaf[rows], x)))
    try:
        z, again = (of_rows(params, x, np.array(rows, np.int32)) for rows in ([0, 1], [1, 1]))
    except Exception:  # A model for batches of one size; where that matters, it is explained later.
        return
    check_outputs(z, 2, subject)
    second = jax.tree.map(lambda leaf: leaf[1:], jax.tree.map(np.asarray, z))
    _refuse_coupled(again, second, "an example changes with its place in the batch or with the rest of it", subject)


def _refuse_coupled(found: Output, expected: Output, change: str, subject: str) -> None:
    """Refuse outputs whose first examples differ."""
    found, expected = (jax.tree.map(np.asarray, tree) for tree in (found, expected))
    shapes = [jax.tree.map(lambda leaf: leaf.shape[1:], tree) for tree in (found, expected)]
    finite_part = lambda leaf: np.where(np.isfinite(leaf), leaf, 0.0)
    scale = max(float(np.max(np.abs(finite_part(leaf)), initial=0.0)) for leaf in jax.tree.leaves(expected))
    eps = max(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(expected))
    close = lambda a, b: np.allclose(a[:1], b[:1], rtol=0.0, atol=eps**0.5 * (scale + eps), equal_nan=True)
    if shapes[0] != shapes[1] or not all(jax.tree.leaves(jax.tree.map(close, found, expected))):
        raise ValueError(
            f"{subject}: the output for {change}, so the model couples examples (batch normalisation in training mode, "
            "a shared random mask, a hard-coded batch size). Use its inference mode, or give each example its own key "
            "inside `x`; `check=False` turns this test off."
        )


def finite(tree: PyTree) -> Requirement:
    return Requirement(
        jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)])),
        "finite numbers",
        "Look for NaN or infinity in `params` and `x`, or for an overflow inside the model.",
    )
