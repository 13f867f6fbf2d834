"""The metric of a function of the output, as its Hessian by automatic differentiation."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from natgrad import _linalg, _tree
from natgrad._check import Requirement, is_concrete, require
from natgrad._types import Output, Scalar

Function = Callable[[Output], Scalar]


def hessian_mv(function: Function, z: Output, v: Output) -> Output:
    return jax.jvp(jax.grad(function), (z,), (v,))[1]


def hessian_factor(function: Function, z: Output) -> Output:
    matrix = _linalg.dense(lambda v: hessian_mv(function, z, v), z)
    return jax.vmap(_tree.unravel_like(z))(_linalg.square_root(matrix).T)


def check_semidefinite(function: Function, z: Output, label: str, needs: str, remedy: str) -> None:
    """Refuse a concrete `z` where the Hessian has a negative eigenvalue, or is not finite."""
    if not is_concrete(z):
        return
    factor = hessian_factor(function, z)
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(factor)]))
    require(z, [Requirement(finite, needs, remedy)], label)
