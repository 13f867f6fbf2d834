"""Factorisations of many matrices, those of one size in one call."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from natgrad._operator.base import Eigen


def batched(function: Callable[[Array], Any], stacks: Sequence[Array]) -> list[Any]:
    """`function` of every stack of matrices, called once for all that have the same size and dtype."""
    by_kind: dict[Any, list[int]] = {}
    for index, stack in enumerate(stacks):
        by_kind.setdefault((stack.shape[-1], stack.dtype), []).append(index)
    results: list[Any] = [None] * len(stacks)
    joined = None
    for (size, _), indices in by_kind.items():
        flat = [stacks[index].reshape(-1, size, size) for index in indices]
        joined = function(_after(joined, jnp.concatenate(flat) if len(flat) > 1 else flat[0]))
        start = 0
        for index, part in zip(indices, flat, strict=True):
            own, lead = slice(start, start + len(part)), stacks[index].shape[:-2]
            results[index] = jax.tree.map(lambda x: x[own].reshape(*lead, *x.shape[1:]), joined)  # noqa: B023
            start += len(part)
    return results


def _after(previous: Any, matrices: Float[Array, "m k k"]) -> Float[Array, "m k k"]:
    """The same matrices, for a call that waits for the results of another.

    Calls of LAPACK in one program run at the same time on CPUs (JAX 0.10), and those for Cholesky factors have then
    been seen to wait for each other forever. No number is above infinity, but compilers do not know."""
    if previous is None:
        return matrices
    first = jax.tree.leaves(previous)[0].reshape(-1)[0]
    return matrices + (first > jnp.inf).astype(matrices.dtype)


def symmetric(matrices: Float[Array, "m k k"]) -> Float[Array, "m k k"]:
    return (matrices + matrices.mT) / 2


def eigen(matrices: Float[Array, "m k k"]) -> Eigen:
    """Eigenvalues and eigenvectors of semidefinite matrices. Eigenvalues that cannot be told from zero are zero."""
    if matrices.shape[-1] == 1:
        return Eigen(jnp.maximum(matrices[:, 0], 0.0), jnp.ones_like(matrices))
    values, vectors = jnp.linalg.eigh(symmetric(matrices))
    return Eigen(without_rounding(values, matrices.shape[-1]), vectors)


def without_rounding(values: Float[Array, "m ..."], size: int) -> Float[Array, "m ..."]:
    """Eigenvalues, with zero in place of those that are rounding next to the largest of a matrix of the given size."""
    largest = jnp.max(values, axis=tuple(range(1, values.ndim)), keepdims=True)
    return jnp.where(values <= size * jnp.finfo(values.dtype).eps * largest, 0.0, values)


def inverse(matrices: Float[Array, "m k k"]) -> tuple[Float[Array, "m k k"], Bool[Array, " m"]]:
    """Inverses of positive definite matrices by their Cholesky factors, and whether each was found.

    A matrix that is definite only beyond rounding has none. It is taken once more with as much on its diagonal as can
    be told from zero."""
    if matrices.shape[-1] == 1:
        return 1 / matrices, jnp.isfinite(1 / matrices[:, 0, 0])
    matrices = symmetric(matrices)
    found = _by_cholesky(matrices)
    is_good = jnp.all(jnp.isfinite(found), axis=(1, 2))
    again = lambda: jnp.where(is_good[:, None, None], found, _by_cholesky(_lifted(matrices)))
    return jax.lax.cond(jnp.all(is_good), lambda: found, again), is_good


def _by_cholesky(matrices: Float[Array, "m k k"]) -> Float[Array, "m k k"]:
    identity = jnp.eye(matrices.shape[-1], dtype=matrices.dtype)
    return jax.vmap(lambda root: jax.scipy.linalg.cho_solve((root, True), identity))(jnp.linalg.cholesky(matrices))


def _lifted(matrices: Float[Array, "m k k"]) -> Float[Array, "m k k"]:
    norms = jnp.linalg.norm(matrices, axis=(1, 2), keepdims=True)
    rounding = 16 * jnp.finfo(matrices.dtype).eps * norms
    return matrices + rounding * jnp.eye(matrices.shape[-1], dtype=matrices.dtype)[None]
