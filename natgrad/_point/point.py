"""A model at its parameters on a batch."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from natgrad._check import caller, public
from natgrad._model import check_params, without_aux
from natgrad._point.forward import forward_pass
from natgrad._point.per_example import PerExample
from natgrad._point.probe import check_model


@public
def per_example(
    model: Callable,
    params: PyTree,
    x: PyTree,
    cotangents: PyTree,
    *,
    in_axes: PyTree = 0,
    has_aux: bool = False,
    check: bool = True,
    budget: int = 2**26,
) -> PerExample:
    r"""The gradients $g_i = J_i^\top u_i$ of single examples as a linear map, at the cost of about one gradient.

    **Arguments:**

    - `model`: `model(params, x) -> z`, with examples along the leading axis of `z`. With `x=None` it is
      `model(params)`, one example.
    - `cotangents`: $u_i$, like the outputs: for the gradients of a loss, its derivative with respect to `z`. An axis in
      front of all leaves gives several to each example, for which the forward pass is shared. A function
      `z -> cotangents` sees the outputs without a second forward pass.
    - `in_axes`: as in `jax.vmap`, where the examples are in `x`: an axis, `None` for arrays that all examples share, or
      a tree of these.
    - `has_aux`: whether the model returns `(z, aux)`; `aux` is then left out.
    - `check`: whether to test that the model treats examples independently and that the gradients of examples sum to
      the gradient of the batch. On concrete data this is done once for a model and its shapes, for the cost of a
      gradient. Under `jit` it is read off the program where that is possible, and otherwise costs a forward pass.
    - `budget`: how many bytes may be used at once for what has to be formed for each example.
    """
    check_params(params)
    model = without_aux(model, has_aux)
    is_left = check and check_model(model, params, x, in_axes)
    forward = forward_pass(model, params, x, in_axes=in_axes, budget=budget, check=is_left)
    if callable(cotangents):
        cotangents = cotangents(forward.z if x is not None else jax.tree.map(lambda z: z[0], forward.z))
    return forward.pull(cotangents, is_stacked=check_cotangents(cotangents, forward.program.outputs, x))


def check_cotangents(cotangents: PyTree, outputs: PyTree, x: PyTree) -> bool:
    """Whether there is an axis of several cotangents an example; anything else unlike the outputs is refused."""
    without_data = (lambda shape: shape[1:]) if x is None else (lambda shape: shape)
    expected = jax.tree.map(lambda leaf: without_data(leaf.shape), outputs)
    given = jax.tree.map(jnp.shape, cotangents)
    if given == expected:
        return False
    leaves, structure = jax.tree.flatten(cotangents)
    shapes = [jnp.shape(leaf) for leaf in leaves]
    if structure == jax.tree.structure(outputs):
        sizes = {shape[:1] for shape in shapes}
        same = all(u[1:] == without_data(z.shape) for u, z in zip(shapes, jax.tree.leaves(outputs), strict=True))
        if same and len(sizes) == 1 and sizes.isdisjoint({(), (0,)}):
            return True
    raise ValueError(
        f"{caller()} needs `cotangents` like the outputs of the model, of shape {expected}, perhaps with one more axis "
        f"in front, but got {given}."
    )
