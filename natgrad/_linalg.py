r"""Dense linear algebra shared by families, geometries, metrics and solvers.

Factorisations take one matrix `n n`, or a stack of matrices `... n n`. On CPUs they go through a stack one matrix at a
time, also under `jax.vmap`, because LAPACK calls on whole stacks can hang there. jaxlib 0.10.1, unlike 0.8.0 and
0.12.0, splits a stack into tasks for the thread pool in which the call itself waits for them; as many such calls at
once as there are threads wait forever. With many cores they also corrupt memory
(https://github.com/jax-ml/jax/issues/39292). Calls on one matrix do neither. The loop costs 0.1 s more to compile and
nothing to run for matrices of 5 rows and more, and takes three times as long for 2,000 matrices of 2 rows (JAX 0.10.1).
Look again when jaxlib before 0.11 is no longer supported. Reproduced by `test_factorisations_of_stacks_hang`.

Derivatives are written out, because `jax.custom_batching.custom_vmap` has none in reverse mode (JAX 0.10.1).
Reproduced by `test_custom_vmap_has_no_gradient`. All reproductions are in `tests/test_workarounds.py`."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from natgrad._types import Matrix

Matrices = Float[Array, "*stack n n"]
Columns = Float[Array, "... n k"]


def one_by_one(function: Callable) -> Callable:
    """Extend a function of matrices to stacks of matrices, which it goes through one by one on CPUs."""

    @jax.custom_batching.custom_vmap
    def guarded(*matrices: Any) -> Any:
        return function(*matrices)

    @guarded.def_vmap
    def _(axis_size: int, is_batched: list[bool], *matrices: Any) -> tuple[Any, Any]:
        stacks = [
            x if is_stack else jnp.broadcast_to(x, (axis_size, *x.shape))
            for x, is_stack in zip(matrices, is_batched, strict=True)
        ]
        if axis_size == 1:
            results = jax.tree.map(lambda result: result[None], guarded(*(stack[0] for stack in stacks)))
        else:
            results = jax.lax.platform_dependent(
                *stacks,
                cpu=lambda *stacks: jax.lax.map(lambda matrices: guarded(*matrices), stacks),
                default=lambda *stacks: jax.vmap(function)(*stacks),
            )
        return results, jax.tree.map(lambda _: True, results)

    # Stacks are flattened to one leading axis, so that `guarded` is mapped once.
    @functools.wraps(function)
    def of_stacks(*stacks: Any) -> Any:
        lead = jnp.broadcast_shapes(*(stack.shape[:-2] for stack in stacks))
        if not lead:
            return guarded(*stacks)
        joined = [
            jnp.broadcast_to(stack, (*lead, *stack.shape[-2:])).reshape(-1, *stack.shape[-2:]) for stack in stacks
        ]
        results = jax.vmap(guarded)(*joined)
        return jax.tree.map(lambda result: result.reshape(*lead, *result.shape[1:]), results)

    return of_stacks


_cholesky = one_by_one(functools.partial(jax.lax.linalg.cholesky, symmetrize_input=False))
_eigh = one_by_one(lambda matrix: tuple(jnp.linalg.eigh(matrix, symmetrize_input=False)))
_eigvalsh = one_by_one(functools.partial(jnp.linalg.eigvalsh, symmetrize_input=False))
_lower_solve = functools.partial(jax.lax.linalg.triangular_solve, left_side=True, lower=True)
_forward = one_by_one(_lower_solve)
_backward = one_by_one(functools.partial(_lower_solve, transpose_a=True))
_svd = one_by_one(lambda matrix: tuple(jnp.linalg.svd(matrix, full_matrices=False)))
least_squares = one_by_one(lambda matrix, b: jnp.linalg.lstsq(matrix, b)[0])


@one_by_one
def _inverse(matrix: Matrix) -> Matrix:
    root = jax.lax.linalg.cholesky(matrix, symmetrize_input=False)
    return _lower_solve(root, _lower_solve(root, jnp.eye(len(matrix), dtype=matrix.dtype)), transpose_a=True)


@jax.custom_jvp
def inverse(matrix: Matrices) -> Matrices:
    """The inverse of a positive definite matrix; NaN if it is not positive definite. Only the lower half is read."""
    return _inverse(matrix)


@inverse.defjvp
def _(primals, tangents):
    r"""$d(A^{-1}) = -A^{-1}\,dA\,A^{-1}$."""
    inverse_matrix = inverse(*primals)
    return inverse_matrix, -inverse_matrix @ tangents[0] @ inverse_matrix


@jax.custom_jvp
def svd(matrix: Float[Array, "*stack m n"]) -> tuple[Any, Any, Any]:
    r"""The singular value decomposition $U S V^\top$, with $\min(m, n)$ singular values."""
    return _svd(matrix)


@svd.defjvp
def _(primals, tangents):
    return jax.jvp(lambda matrix: tuple(jnp.linalg.svd(matrix, full_matrices=False)), primals, tangents)


@jax.custom_jvp
def cholesky(matrix: Matrices) -> Matrices:
    r"""The lower triangular $L$ with $L L^\top$ the given matrix; NaN if it is not positive definite.

    Only the lower half is read."""
    return _cholesky(matrix)


@cholesky.defjvp
def _(primals, tangents):
    r"""$dL = L\,\Phi(L^{-1}\,dA\,L^{-\top})$, where $\Phi$ takes the lower half, and half of the diagonal."""
    root = cholesky(*primals)
    lower = jnp.tril(tangents[0])
    dA = lower + jnp.tril(lower, -1).mT
    whitened = triangular_solve(root, triangular_solve(root, dA).mT)
    half = jnp.tril(whitened) - identity_like(whitened) * whitened / 2
    return root, root @ half


def triangular_solve(root: Matrices, b: Columns, *, transposed: bool = False) -> Columns:
    r"""$L^{-1}b$ for a lower triangular matrix $L$, or $L^{-\top}b$."""
    lead = jnp.broadcast_shapes(root.shape[:-2], b.shape[:-2])
    root, b = (jnp.broadcast_to(x, (*lead, *x.shape[-2:])) for x in (root, b))
    forward = lambda _, b: _forward(root, b)
    backward = lambda _, b: _backward(root, b)
    if transposed:
        return jax.lax.custom_linear_solve(lambda x: jnp.tril(root).mT @ x, b, backward, forward)
    return jax.lax.custom_linear_solve(lambda x: jnp.tril(root) @ x, b, forward, backward)


def cholesky_solve(root: Matrices, b: Columns) -> Columns:
    r"""$(L L^\top)^{-1}b$ for a Cholesky factor $L$."""
    return triangular_solve(root, triangular_solve(root, b), transposed=True)


@jax.custom_jvp
def eigh(matrix: Matrices) -> tuple[Float[Array, "*stack n"], Matrices]:
    """Eigenvalues in ascending order and eigenvectors (in columns) of a symmetric matrix.

    Derivatives are not finite where two eigenvalues are equal."""
    return _eigh(matrix)


@eigh.defjvp
def _(primals, tangents):
    r"""With $M = Q^\top dA\,Q$: $d\lambda_i = M_{ii}$, and $dQ = Q X$ with $X_{ij} = M_{ij} / (\lambda_j - \lambda_i)$,
    $X_{ii} = 0$."""
    values, vectors = eigh(*primals)
    rotated = vectors.mT @ tangents[0] @ vectors
    identity = identity_like(rotated)
    # One on the diagonal, where the gap is zero, and taken off after the division.
    gaps = values[..., None, :] - values[..., :, None] + identity
    return (values, vectors), (
        jnp.diagonal(rotated, axis1=-2, axis2=-1),
        vectors @ (rotated * (1 / gaps - identity)),
    )


@jax.custom_jvp
def eigvalsh(matrix: Matrices) -> Float[Array, "*stack n"]:
    """The eigenvalues of a symmetric matrix in ascending order, for a third of the cost of `eigh`."""
    return _eigvalsh(matrix)


@eigvalsh.defjvp
def _(primals, tangents):
    (values, _), (changes, _) = jax.jvp(eigh, primals, tangents)
    return values, changes


def pseudo_inverse(matrix: Matrix) -> Matrix:
    """The pseudo-inverse of a symmetric matrix. Eigenvalues within rounding of zero count as zero."""
    values, vectors = eigh((matrix + matrix.T) / 2)
    # The error of computed eigenvalues is this, times a small factor.
    rounding = values.size * jnp.finfo(values.dtype).eps * jnp.max(jnp.abs(values), initial=0.0)
    is_nonzero = jnp.abs(values) > 10 * rounding
    return (vectors * jnp.where(is_nonzero, 1 / jnp.where(is_nonzero, values, 1.0), 0.0)[None, :]) @ vectors.T


def identity_like(matrices: Matrices) -> Matrices:
    return jnp.broadcast_to(jnp.eye(matrices.shape[-1], dtype=matrices.dtype), matrices.shape)


def dense(mv: Callable[[PyTree], PyTree], like: PyTree) -> Matrix:
    """The matrix of a linear map between trees like `like`, in the order of `ravel_pytree`."""
    flat, unravel = ravel_pytree(like)
    columns = jax.vmap(lambda e: ravel_pytree(mv(unravel(e)))[0])(jnp.eye(flat.size, dtype=flat.dtype))
    return columns.T


def square_root(matrix: Matrix) -> Matrix:
    r"""A factor $S$ with $S S^\top$ the given positive semidefinite matrix, which may be singular.

    Eigenvalues within rounding of zero count as zero. An eigenvalue that is negative beyond rounding leaves NaN in its
    column, so that an indefinite matrix is never taken for a semidefinite one."""
    values, vectors = eigh((matrix + matrix.T) / 2)
    rounding = matrix.shape[0] * jnp.finfo(matrix.dtype).eps * jnp.max(jnp.abs(values), initial=0.0)
    return vectors * jnp.sqrt(jnp.where(jnp.abs(values) <= 8 * rounding, 0.0, values))[None, :]
