"""The optimiser as a transformation for optax."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from natgrad._optimiser.damping.constant import ConstantDamping
from natgrad._optimiser.momentum import NoMomentum
from natgrad._optimiser.natural_gradient import NaturalGradient
from natgrad._optimiser.step.constant import ConstantStep


def as_optax(opt: NaturalGradient, batch: Any) -> optax.GradientTransformationExtraArgs:
    """The optimiser as a gradient transformation: `update(grads, state, params, batch=..., key=...)` returns what to
    add to the parameters. It chains with others, of which those before it change the gradient that is followed, and
    those after it the update that comes of it.

    **Arguments:**

    - `batch`: of the shapes of those to come: arrays, or `jax.ShapeDtypeStruct`s.
    """

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, *, batch: Any = None, key=None, **extra: Any
    ) -> tuple[PyTree, Any]:
        del extra
        if params is None or batch is None:
            raise ValueError(
                "The natural gradient needs the parameters and the batch that the gradient is of: call "
                "`update(grads, state, params, batch=(x, y), key=key)`."
            )
        return opt.update(updates, state, params, batch, key)[:2]

    def init(params: PyTree) -> Any:
        return opt.init(params, batch)

    return optax.GradientTransformationExtraArgs(init, update)


def scale_by_natural_gradient(
    model: Any,
    objective: Any,
    batch: Any,
    structure: Any = None,
    damping: Any = None,
    **options: Any,
) -> optax.GradientTransformationExtraArgs:
    r"""Replaces gradients $g$ by natural gradients $(G + D)^{-1}g$, as one of the transformations that `optax.chain`
    takes; learning rate and momentum are left to others, such as `optax.scale(-0.1)`.

    **Arguments:**

    - `batch`: as for `as_optax`; others as for `NaturalGradient`. Damping is constant by default, at the mean
      eigenvalue of the metric of the first batch.
    """
    damping = ConstantDamping() if damping is None else damping
    opt = NaturalGradient(model, objective, structure, damping, ConstantStep(1.0), NoMomentum(), **options)
    init, downhill = as_optax(opt, batch)

    def update(updates: PyTree, state: PyTree, params: PyTree | None = None, **extra: Any):
        updates, state = downhill(updates, state, params, **extra)
        return jax.tree.map(jnp.negative, updates), state

    return optax.GradientTransformationExtraArgs(init, update)
