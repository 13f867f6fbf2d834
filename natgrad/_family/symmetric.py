r"""Parameters that are symmetric matrices, handled in one place.

A symmetric matrix of size $d$ has $d(d+1)/2$ degrees of freedom, but is stored as all $d^2$ entries. What makes
that safe is the inner product: $\langle A, B\rangle = \operatorname{tr}(A^\top B)$ counts each off-diagonal entry
twice, once per triangle, in natural parameters and in moments alike. Two rules follow.

- A function of a symmetric parameter symmetrises it first. Its gradient over all entries is then the
  symmetric matrix that represents the derivative in the trace inner product, and its Hessian annihilates antisymmetric
  directions instead of being indefinite along them.
- Coordinates that are orthonormal for the trace inner product scale off-diagonal entries by $\sqrt2$; a list
  of the upper triangle alone would halve their weight.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from natgrad._check import Requirement
from natgrad._linalg import cholesky


def symmetrise(matrix: Float[Array, "*lead d d"]) -> Float[Array, "*lead d d"]:
    return (matrix + jnp.swapaxes(matrix, -1, -2)) / 2


def is_symmetric(matrix: Float[Array, "*lead d d"]) -> Bool[Array, ""]:
    """Symmetric up to what computing an inverse may leave behind: half the digits."""
    slack = jnp.sqrt(jnp.finfo(matrix.dtype).eps) * jnp.max(jnp.abs(matrix), initial=0.0)
    return jnp.all(jnp.abs(matrix - jnp.swapaxes(matrix, -1, -2)) <= slack)


def is_positive_definite(matrix: Float[Array, "*lead d d"]) -> Bool[Array, ""]:
    return jnp.all(jnp.isfinite(cholesky(symmetrise(matrix))))


def positive_definite(matrix: Float[Array, "*lead d d"], name: str) -> list[Requirement]:
    """What a precision or a covariance must satisfy."""
    return [
        Requirement(
            is_symmetric(matrix),
            f"{name} to be symmetric",
            "Symmetrise it with `(A + A.T) / 2` if the difference is rounding.",
        ),
        Requirement(
            is_positive_definite(matrix),
            f"{name} to be positive definite",
            "Check the sign of the matrix, or add a small multiple of the identity.",
        ),
    ]


def outer(x: Float[Array, "*lead d"], y: Float[Array, "*lead d"]) -> Float[Array, "*lead d d"]:
    return x[..., :, None] * y[..., None, :]


def orthonormal_basis(dim: int, dtype) -> Float[Array, "columns d d"]:
    r"""A basis of the symmetric matrices, orthonormal in the trace inner product: $e_i e_i^\top$ and
    $(e_i e_j^\top + e_j e_i^\top)/\sqrt2$."""
    rows, columns = jnp.triu_indices(dim)
    index = jnp.arange(rows.size)
    half = jnp.where(rows == columns, 0.5, jnp.sqrt(0.5)).astype(dtype)
    basis = jnp.zeros((rows.size, dim, dim), dtype)
    return basis.at[index, rows, columns].add(half).at[index, columns, rows].add(half)
