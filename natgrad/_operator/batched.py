"""Factorisations of many matrices, those of one size in one call."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from natgrad._operator.base import Eigen


def batched(function: Callable[[Array], Any], stacks: Sequence[Float[Array, "... k k"]]) -> list[Any]:
    """`function` of every stack of matrices, called once for all that have the same size and dtype."""
    by_kind: dict[Any, list[int]] = {}
    for index, stack in enumerate(stacks):
        by_kind.setdefault((stack.shape[-1], stack.dtype), []).append(index)
    results: list[Any] = [None] * len(stacks)
    for (size, _), indices in by_kind.items():
        flat = [stacks[index].reshape(-1, size, size) for index in indices]
        joined = function(jnp.concatenate(flat) if len(flat) > 1 else flat[0])
        start = 0
        for index, part in zip(indices, flat, strict=True):
            lead = stacks[index].shape[:-2]
            cut = lambda x, start=start, stop=start + len(part), lead=lead: x[start:stop].reshape(*lead, *x.shape[1:])
            results[index] = jax.tree.map(cut, joined)
            start += len(part)
    return results


def symmetric(matrices: Float[Array, "m k k"]) -> Float[Array, "m k k"]:
    return (matrices + matrices.mT) / 2


def eigen(matrices: Float[Array, "m k k"]) -> Eigen:
    """Eigenvalues and eigenvectors of semidefinite matrices. Eigenvalues that are negative by rounding are zero."""
    if matrices.shape[-1] == 1:
        return Eigen(jnp.maximum(matrices[:, 0], 0.0), jnp.ones_like(matrices))
    values, vectors = jnp.linalg.eigh(symmetric(matrices))
    return Eigen(jnp.maximum(values, 0.0), vectors)


def inverse(matrices: Float[Array, "m k k"]) -> tuple[Float[Array, "m k k"], Bool[Array, " m"]]:
    """Inverses of positive definite matrices, and whether each was found.

    By Cholesky factors; where one of them does not exist, because a matrix is definite only beyond rounding, by
    eigenvalues, of which those that are too small to be told from zero are taken to be the smallest that can."""
    if matrices.shape[-1] == 1:
        return 1 / matrices, jnp.isfinite(1 / matrices[:, 0, 0])
    matrices = symmetric(matrices)
    found = _by_cholesky(matrices)
    is_good = jnp.all(jnp.isfinite(found), axis=(1, 2))
    found = jax.lax.cond(
        jnp.all(is_good),
        lambda: found,
        lambda: jnp.where(is_good[:, None, None], found, _by_eigenvalues(matrices)),
    )
    return found, is_good


def _by_cholesky(matrices: Array) -> Array:
    identity = jnp.broadcast_to(jnp.eye(matrices.shape[-1], dtype=matrices.dtype), matrices.shape)
    root = jnp.linalg.cholesky(matrices, symmetrize_input=False)
    half = jax.lax.linalg.triangular_solve(root, identity, left_side=True, lower=True)
    return half.mT @ half


def _by_eigenvalues(matrices: Array) -> Array:
    values, vectors = jnp.linalg.eigh(matrices, symmetrize_input=False)
    rounding = jnp.finfo(matrices.dtype).eps * jnp.max(jnp.abs(values), axis=-1, keepdims=True)
    return (vectors / jnp.maximum(values, rounding)[:, None, :]) @ vectors.mT
