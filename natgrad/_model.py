"""What a model is asked to be: a function of parameters and a batch that treats every example alike."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from natgrad import _tree
from natgrad._backend import require_sound
from natgrad._check import Requirement, caller
from natgrad._types import Output


class WithoutAux(eqx.Module):
    """A model that returns `(z, aux)`, as one that returns `z`."""

    model: Callable = eqx.field(converter=_tree.as_callable)

    def __call__(self, *arguments: PyTree) -> Output:
        found = self.model(*arguments)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise TypeError(
                f"`has_aux=True` needs a model that returns a pair `(z, aux)`, but it returned `{type(found).__name__}`"
                + (f" of length {len(found)}." if isinstance(found, tuple | list) else ".")
            )
        return found[0]


def without_aux(model: Callable, has_aux: bool) -> Callable:
    return WithoutAux(model) if has_aux else model


def num_examples(x: PyTree, in_axes: PyTree = 0, label: str | None = None) -> int:
    if x is None:
        return 1
    leaves = list(zip(jax.tree.leaves(x), example_axes(x, in_axes), strict=True))
    shapes = [jnp.shape(leaf) for leaf, axis in leaves if axis is not None]
    short = any(not -jnp.ndim(leaf) <= axis < jnp.ndim(leaf) for leaf, axis in leaves if axis is not None)
    sizes = set() if short else {jnp.shape(leaf)[axis] for leaf, axis in leaves if axis is not None}
    if len(sizes) != 1:
        where = "leading axis" if all(axis == 0 for _, axis in leaves) else f"axis (`in_axes={in_axes}`)"
        raise ValueError(
            f"{label or caller()} needs every array of `x` to have the same {where} of examples, but got shapes "
            f"{shapes}."
        )
    (count,) = sizes
    if count == 0:
        raise ValueError(f"{label or caller()} got an empty batch, and an average over no examples has no meaning.")
    return count


def example_axes(x: PyTree, in_axes: PyTree) -> list[int | None]:
    """The axis of examples in every leaf of `x`, `None` where the examples share it, from a prefix as in `jax.vmap`."""
    leaf = lambda axis: axis is None or isinstance(axis, int)
    try:
        if not all(map(leaf, jax.tree.leaves(in_axes, is_leaf=leaf))):
            raise TypeError("an axis is a number")
        spread = jax.tree.map(lambda axis, part: [axis] * len(jax.tree.leaves(part)), in_axes, x, is_leaf=leaf)
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{caller()} needs `in_axes` to be an axis, `None`, or a tree of these that begins like `x`, but got "
            f"`{in_axes}` for {jax.tree.structure(x)}."
        ) from error
    return jax.tree.leaves(spread, is_leaf=lambda part: part is None)


def check_params(params: PyTree) -> None:
    require_sound()
    leaves = jax.tree_util.tree_leaves_with_path(params)
    if not leaves:
        raise ValueError(f"{caller()} got `params` without any array.")
    for path, leaf in leaves:
        dtype: Any = getattr(leaf, "dtype", type(leaf).__name__)
        if not hasattr(leaf, "dtype") or not jnp.issubdtype(dtype, jnp.floating):
            raise TypeError(
                f"{caller()} needs parameters that are real floating-point arrays, but "
                f"`params{jax.tree_util.keystr(path)}` is `{dtype}`. Close over it in the model, or pass only the "
                "trainable part of the parameters."
            )


def check_structure(expected: PyTree, given: PyTree, label: str) -> None:
    """Refuse a tree whose structure or shapes differ from those of the parameters."""
    shapes = [jax.tree.map(lambda leaf: tuple(jnp.shape(leaf)), tree) for tree in (expected, given)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{label} needs a tree with the structure and shapes of the parameters, {shapes[0]}, but got {shapes[1]}."
        )


def check_outputs(z: PyTree, count: int) -> None:
    """Refuse outputs (or their shapes) that are not real numbers with the examples along the leading axis."""
    for leaf in jax.tree.leaves(z):
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"{caller()}: the output of the model must be real floating-point, but it is `{leaf.dtype}`."
            )
        if leaf.shape[:1] != (count,):
            raise ValueError(
                f"{caller()}: the output of the model must have the {count} examples of `x` along its leading axis, "
                f"but its shape is {leaf.shape}. Check for a `squeeze`, a sum over the batch or a missing `jax.vmap`."
                + (" A model that returns `(z, aux)` needs `has_aux=True`." if isinstance(z, tuple) else "")
            )


def differing(z: Output, alone: Output) -> Bool[Array, " N"]:
    """Which rows of two outputs differ by more than rounding. Infinities and NaN in the same places do not.

    Rounding is half of the digits next to the same entry of other examples, and a few of the last next to all."""

    def rows(a: Array, b: Array) -> Array:
        sizes = jnp.max(jnp.where(jnp.isfinite(a), jnp.abs(a), 0.0), axis=0, keepdims=True)
        eps = jnp.finfo(a.dtype).eps
        slack = eps**0.5 * sizes + min(1000 * eps, eps**0.5) * jnp.max(sizes, initial=0.0) + jnp.finfo(a.dtype).tiny
        slack = slack.astype(a.dtype)
        is_close = (jnp.abs(a - b) <= slack) | (a == b) | (jnp.isnan(a) & jnp.isnan(b))
        return jnp.any(~is_close.reshape(len(a), -1), axis=1)

    each = jax.tree.leaves(jax.tree.map(rows, z, alone))
    return jnp.any(jnp.stack(each), axis=0)


def coupling_message(primitive: str, rows: Any = None) -> str:
    """Why a model that couples examples is refused, and what to do."""
    count = "" if rows is None else f" for {len(rows)} examples, such as number {rows[0]},"
    through = f" (through `{primitive}`)" if primitive not in ("", "model", "output", "constant") else ""
    return (
        f"{caller()}: the model couples examples{through}:{count} its output in the batch is not the output for the "
        "example alone. Common causes: batch normalisation in training mode, one random mask for the whole batch, a "
        "hard-coded batch size. Use inference mode, or give each example its own key inside `x`. `check=False`, "
        "also in `evaluate`, turns this test off, and treats every example as a batch of one."
    )


def finite(tree: PyTree) -> Requirement:
    return Requirement(
        jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)])),
        "finite numbers",
        "Look for NaN or infinity in `params` and `x`, or for an overflow inside the model.",
    )
