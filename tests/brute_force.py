"""The gradients of single examples, one backward pass each."""

import jax
import jax.numpy as jnp
import numpy as np


def gradients(case, cotangents):
    """A tree like the parameters, with the axes of the cotangents and of the examples in front."""
    leaves, treedef = jax.tree.flatten(case.x)
    axes = axes_of(case)
    z = jax.eval_shape(case.model, case.params, case.x)
    is_stacked = jax.tree.leaves(cotangents)[0].ndim > jax.tree.leaves(z)[0].ndim

    def of_one(x, cotangent):
        def pairing(params):
            batch = [leaf if axis is None else jnp.expand_dims(leaf, axis) for leaf, axis in zip(x, axes, strict=True)]
            z = case.model(params, jax.tree.unflatten(treedef, batch))
            pairs = zip(jax.tree.leaves(z), jax.tree.leaves(cotangent), strict=True)
            return sum(jnp.sum(out[0] * u) for out, u in pairs)

        return jax.grad(pairing)(case.params)

    of_all = jax.vmap(of_one, in_axes=(axes, 0))
    function = jax.vmap(of_all, in_axes=(None, 0)) if is_stacked else of_all
    return jax.jit(function)(leaves, cotangents)


def axes_of(case) -> list[int | None]:
    """The axis of examples in every leaf of the data."""
    spread = jax.tree.map(
        lambda axis, part: [axis] * len(jax.tree.leaves(part)), case.in_axes, case.x, is_leaf=lambda a: a is None
    )
    return jax.tree.leaves(spread, is_leaf=lambda a: a is None)


def flat_rows(tree, num_axes) -> np.ndarray:
    """One row for every gradient, in double precision."""
    leaves = [np.asarray(leaf, float) for leaf in jax.tree.leaves(tree)]
    return np.concatenate([leaf.reshape(int(np.prod(leaf.shape[:num_axes])), -1) for leaf in leaves], axis=1)
