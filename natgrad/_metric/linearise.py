"""A model at a point: its outputs, and its derivative in both directions, computed once."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._check import Requirement, is_concrete, require
from natgrad._types import Output


class Linearisation(eqx.Module):
    r"""The outputs $z = f(w, x)$ of a batch and the Jacobian $J$ at $w$, as products in both directions.

    The forward pass is done once; a product with $J$ or its transpose reuses what it stored."""

    z: Output
    forward: Callable[[PyTree], Output]
    is_reverse_only: bool = eqx.field(static=True)
    _structure: tuple = eqx.field(static=True)

    def push(self, v: PyTree) -> Output:
        r"""$J v$."""
        if self.is_reverse_only:
            # Some part has a rule for the transpose alone: transpose twice.
            return jax.linear_transpose(self.pull, self.z)(v)[0]
        return self.forward(v)

    def pull(self, u: Output) -> PyTree:
        r"""$J^\top u$."""
        return jax.linear_transpose(self.forward, self.structure)(u)[0]

    @property
    def structure(self) -> PyTree:
        leaves, treedef = self._structure
        return jax.tree.unflatten(treedef, leaves)

    @property
    def num_examples(self) -> int:
        return jax.tree.leaves(self.z)[0].shape[0]


def linearise(model: Callable, params: PyTree, x: PyTree, *, check: bool, subject: str) -> Linearisation:
    """Check a model and its data, and differentiate it."""
    check_params(params, subject)
    function = of_params(model, x, subject)
    check_outputs(jax.eval_shape(function, params), x, subject)
    z, forward = jax.linearize(function, params)
    require(z, [finite(z)], f"{subject}: the output of the model", traced=False)
    if check:
        check_examples(model, params, x, z, subject)
    leaves, treedef = jax.tree.flatten(_tree.structure(params))
    is_reverse_only = has_primitive(jax.make_jaxpr(forward)(params).jaxpr, "custom_lin")
    return Linearisation(z, forward, is_reverse_only, (tuple(leaves), treedef))


def has_primitive(jaxpr: Any, name: str) -> bool:
    """Whether a program, or a program inside it, uses a primitive (`custom_lin` stands for a `jax.custom_vjp`)."""
    inner = (getattr(p, "jaxpr", p) for eqn in jaxpr.eqns for p in jax.tree.leaves(list(eqn.params.values())))
    return any(eqn.primitive.name == name for eqn in jaxpr.eqns) or any(
        has_primitive(sub, name) for sub in inner if hasattr(sub, "eqns")
    )


def of_params(model: Callable, x: PyTree, subject: str) -> Callable[[PyTree], Output]:
    """The model as a function of its parameters; one without data counts as a batch of one example."""
    if x is None:
        return lambda params: jax.tree.map(lambda z: jnp.asarray(z)[None], model(params))
    num_examples(x, subject)
    return lambda params: model(params, x)


def num_examples(x: PyTree, subject: str) -> int:
    sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(x)}
    if len(sizes) != 1 or sizes == {()}:
        raise ValueError(
            f"{subject} needs every array of `x` to have the same leading axis of examples, but got shapes "
            f"{[jnp.shape(leaf) for leaf in jax.tree.leaves(x)]}."
        )
    ((count,),) = sizes
    if count == 0:
        raise ValueError(f"{subject} got an empty batch, and an average over no examples has no meaning.")
    return count


def check_params(params: PyTree, subject: str) -> None:
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


def check_outputs(z: PyTree, x: PyTree, subject: str) -> None:
    count = 1 if x is None else num_examples(x, subject)
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


def check_examples(model: Callable, params: PyTree, x: PyTree, z: Output, subject: str) -> None:
    """Refuse a concrete model whose output for an example depends on the rest of the batch."""
    if x is None or not is_concrete((params, x, z)) or jax.tree.leaves(z)[0].shape[0] < 2:
        return
    alone = model(params, jax.tree.map(lambda leaf: leaf[:1], x))
    shapes = [jax.tree.map(lambda leaf: leaf.shape[1:], tree) for tree in (alone, z)]
    scale = max(float(jnp.max(jnp.abs(leaf), initial=0.0)) for leaf in jax.tree.leaves(z))
    eps = max(float(jnp.finfo(leaf.dtype).eps) for leaf in jax.tree.leaves(z))
    same = shapes[0] == shapes[1] and all(
        jax.tree.leaves(
            jax.tree.map(lambda a, b: bool(jnp.all(jnp.abs(a - b[:1]) <= eps**0.5 * (scale + eps))), alone, z)
        )
    )
    if not same:
        raise ValueError(
            f"{subject}: the output for the first example changes when the rest of the batch is left out, so the model "
            "couples examples (batch normalisation in training mode, a shared random mask, a hard-coded batch size). "
            "Use its inference mode, or give each example its own key inside `x`; `check=False` turns this test off."
        )


def finite(tree: PyTree) -> Requirement:
    return Requirement(
        jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)])),
        "finite numbers",
        "Look for NaN or infinity in `params` and `x`, or for an overflow inside the model.",
    )
