"""The optimiser as a transformation for optax."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from natgrad._check import public
from natgrad._optimiser.damping import ConstantDamping
from natgrad._optimiser.info import STEP_RESULTS
from natgrad._optimiser.momentum import NoMomentum
from natgrad._optimiser.natural_gradient import NaturalGradient
from natgrad._optimiser.step.fixed import ConstantStep
from natgrad._optimiser.trainable import filter_of


@public
def as_optax(opt: NaturalGradient, batch: Any, *, all_params: PyTree = None) -> optax.GradientTransformationExtraArgs:
    """The optimiser as a gradient transformation of optax.

    `update(grads, state, params, batch=..., key=...)` returns what to add to the parameters. In `optax.chain`,
    transformations before it act on the gradient and transformations after it on the update. Invalid batches and
    coupled examples raise, also under `jit`; other rejected steps return zeros (`opt.update` returns the `info` that
    says so).

    Under `optax.masked` and `optax.multi_transform`, the parameters that they pass on are trained and the others held
    fixed. The model needs all of them: give `all_params` here and to `update`.

    **Arguments:**

    - `batch`: an example batch with the shapes used in `update`: arrays, or `jax.ShapeDtypeStruct`s.
    - `all_params`: all parameters of the model, or their shapes, where optax passes only some.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng
    import optax

    model, w = lambda w, x: x @ w, jnp.zeros((1, 1))
    x = jnp.array([[1.0], [2.0]])
    batch = x, 3 * x
    opt = ng.NaturalGradient(model, ng.LeastSquares(), ng.Exact(), ng.ConstantDamping(0.5), step=ng.ConstantStep(1.0))
    transform = optax.chain(ng.as_optax(opt, batch), optax.scale(0.5))
    gradient = jax.grad(lambda w: jnp.mean((model(w, x) - 3 * x) ** 2) / 2)(w)
    update, state = jax.jit(transform.update)(gradient, transform.init(w), w, batch=batch)
    assert jnp.allclose(update, 0.5 * 7.5 / 3)
    ```
    """

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, *, batch: Any = None, key=None, **extra: Any
    ) -> tuple[PyTree, Any]:
        if params is None or batch is None:
            raise ValueError(
                "The natural gradient needs the parameters and the batch that the gradient is of: call "
                "`update(grads, state, params, batch=(x, y), key=key)`."
            )
        call = "call `update(grads, state, params, batch=batch, all_params=params)`."
        whole = _whole(params, extra.get("all_params"), call)
        gradient = _whole(updates, jax.tree.map(jnp.zeros_like, whole), call)
        changes, state, info = _training_only(opt, params, whole).update(gradient, state, whole, batch, key)
        # There is no `info` here to say so.
        for result in (STEP_RESULTS.invalid_batch, STEP_RESULTS.coupled):
            changes = eqx.error_if(changes, info.result == result, STEP_RESULTS[result])
        return _hidden(params, changes), state

    def init(params: PyTree) -> Any:
        whole = _whole(params, all_params, "use `as_optax(opt, batch, all_params=params)`.")
        return _training_only(opt, params, whole).init(whole, batch)

    return optax.GradientTransformationExtraArgs(init, update)


@public
def scale_by_natural_gradient(
    model: Any,
    objective: Any,
    batch: Any,
    structure: Any = None,
    damping: Any = None,
    *,
    all_params: PyTree = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    r"""Replaces gradients $g$ by natural gradients $(G + D)^{-1}g$, as a transformation for `optax.chain`.

    Learning rate and momentum are left to other transformations, such as `optax.scale(-0.1)`.

    **Arguments:**

    - `batch`, `all_params`: as for `as_optax`; others as for `NaturalGradient`. Damping is constant by default, at the
      mean eigenvalue of the metric of the first batch.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng
    import optax

    model, w = lambda w, x: x @ w, jnp.zeros((1, 1))
    x = jnp.array([[1.0], [2.0]])
    batch = x, 3 * x
    scale = ng.scale_by_natural_gradient(model, ng.LeastSquares(), batch, ng.Exact(), ng.ConstantDamping(0.5))
    transform = optax.chain(scale, optax.scale(-0.1))
    gradient = jax.grad(lambda w: jnp.mean((model(w, x) - 3 * x) ** 2) / 2)(w)
    update, state = jax.jit(transform.update)(gradient, transform.init(w), w, batch=batch)
    assert jnp.allclose(update, 0.1 * 7.5 / 3)
    ```
    """
    damping = ConstantDamping() if damping is None else damping
    opt = NaturalGradient(
        model, objective, structure, damping, step=ConstantStep(1.0), momentum=NoMomentum(), **options
    )
    init, downhill = as_optax(opt, batch, all_params=all_params)

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any):
        updates, state = downhill(updates, state, params, **extra)
        return jax.tree.map(jnp.negative, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


# Under `optax.masked` a node stands in place of what is hidden, be it one leaf or many.


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _whole(tree: PyTree, others: PyTree, remedy: str) -> PyTree:
    """A tree with what `others` has in place of what is hidden."""
    if not any(map(_is_masked, jax.tree.leaves(tree, is_leaf=_is_masked))):
        return tree
    if others is None:
        raise ValueError(
            "optax passes only some of the parameters here (`optax.masked`, `optax.multi_transform`), but the model "
            f"needs all of them: {remedy}"
        )
    return jax.tree.map(lambda leaf, other: other if _is_masked(leaf) else leaf, tree, others, is_leaf=_is_masked)


def _hidden(tree: PyTree, whole: PyTree) -> PyTree:
    """A whole tree without what is hidden in another."""
    return jax.tree.map(lambda leaf, other: leaf if _is_masked(leaf) else other, tree, whole, is_leaf=_is_masked)


def _training_only(opt: NaturalGradient, params: PyTree, whole: PyTree) -> NaturalGradient:
    """The optimiser, training only what is not hidden."""
    if whole is params:
        return opt

    def shown(leaf, other):
        return jax.tree.map(lambda _: not _is_masked(leaf), other)

    flags = jax.tree.map(shown, params, whole, is_leaf=_is_masked)
    if opt.trainable is not None:
        flags = jax.tree.map(lambda a, b: a and b, flags, filter_of(whole, opt.trainable))
    return eqx.tree_at(lambda opt: opt.trainable, opt, flags, is_leaf=lambda node: node is None)
