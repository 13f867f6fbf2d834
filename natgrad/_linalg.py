"""Dense linear algebra shared by families, geometries and metrics."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import PyTree

from natgrad._types import Matrix


def dense(mv: Callable[[PyTree], PyTree], like: PyTree) -> Matrix:
    """The matrix of a linear map between trees like `like`, in the order of `ravel_pytree`."""
    flat, unravel = ravel_pytree(like)
    columns = jax.vmap(lambda e: ravel_pytree(mv(unravel(e)))[0])(jnp.eye(flat.size, dtype=flat.dtype))
    return columns.T


def square_root(matrix: Matrix) -> Matrix:
    r"""A factor $S$ with $S S^\top$ the given positive semidefinite matrix, singular ones included.

    Eigenvalues that are negative by rounding count as zero. One that is negative beyond rounding
    leaves `nan` in its column, so that an indefinite matrix never passes for a semidefinite one."""
    values, vectors = jnp.linalg.eigh((matrix + matrix.T) / 2)
    rounding = matrix.shape[0] * jnp.finfo(matrix.dtype).eps * jnp.max(jnp.abs(values), initial=0.0)
    return vectors * jnp.sqrt(jnp.where(jnp.abs(values) <= 8 * rounding, 0.0, values))[None, :]
