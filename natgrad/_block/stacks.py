"""Factorisations of many matrices, those of one size in one call."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from natgrad import _linalg
from natgrad._block.base import Eigen

# How large a matrix has to be, next to a larger one, to be padded to its size. Below some size all are, as long as the
# padded ones have few entries: 1,024 matrices of 2 rows padded to 128 rows take 350 ms, by themselves 1 ms.
PADDING = 0.95
SMALL = 128
MAX_PADDED_ENTRIES = 2**16


def eigens(stacks: Sequence[Array]) -> list[Eigen]:
    """Eigenvalues and eigenvectors of stacks of semidefinite matrices."""
    return batched(eigen, stacks)


def batched(function: Callable[[Array], Any], stacks: Sequence[Array]) -> list[Any]:
    """`function` of every stack of matrices, called once for all that have the same size and dtype."""
    joined, parts = _joined(stacks)
    results = [function(matrices) for matrices in joined]
    own = lambda stack, part: jax.tree.map(
        lambda x: x[part.rows].reshape(*stack.shape[:-2], *x.shape[1:]), results[part.number]
    )
    return [own(stack, part) for stack, part in zip(stacks, parts, strict=True)]


class _Part(NamedTuple):
    """Where a stack is among the joined ones."""

    number: int
    rows: slice


def _joined(stacks: Sequence[Array]) -> tuple[list[Array], list[_Part]]:
    """All stacks of one size and dtype as one."""
    by_kind: dict[Any, list[Array]] = {}
    parts = []
    for stack in stacks:
        kind = stack.shape[-1], stack.dtype
        flat = stack.reshape(-1, *stack.shape[-2:])
        start = sum(map(len, by_kind.setdefault(kind, [])))
        by_kind[kind].append(flat)
        parts.append(_Part(list(by_kind).index(kind), slice(start, start + len(flat))))
    return [jnp.concatenate(own) if len(own) > 1 else own[0] for own in by_kind.values()], parts


def eigen(matrices: Float[Array, "m k k"]) -> Eigen:
    """Eigenvalues and eigenvectors of semidefinite matrices. Eigenvalues that cannot be told from zero are zero."""
    if matrices.shape[-1] == 1:
        return Eigen(jnp.maximum(matrices[:, 0], 0.0), jnp.ones_like(matrices))
    values, vectors = _linalg.eigh((matrices + matrices.mT) / 2)
    return Eigen(without_rounding(values, matrices.shape[-1]), vectors)


def without_rounding(values: Float[Array, "m ..."], size: int) -> Float[Array, "m ..."]:
    """Eigenvalues, with zero in place of those that are rounding next to the largest of a matrix of the given size."""
    largest = jnp.max(values, axis=tuple(range(1, values.ndim)), keepdims=True)
    return jnp.where(values <= size * jnp.finfo(values.dtype).eps * largest, 0.0, values)


def damped_inverses(
    stacks: Sequence[Array], traces: Float[Array, " m"], scale: Float[Array, " m"], wanted: Float[Array, " m"]
) -> tuple[list[Array], Bool[Array, " m"], Bool[Array, " m"]]:
    r"""Inverses $(s F + d I)^{-1}$ of semidefinite matrices by their Cholesky factors, for scales $s$ and damping $d$
    in the order of the stacks; and for every matrix whether the damping was enough, and whether the inverse is
    finite.

    Damping that cannot be told from zero next to the matrix is raised until it can. Matrices of almost the same size
    are padded to the largest of them and go together, and numbers that belong to matrices are handled as one vector:
    every operation costs time to compile."""
    sizes = [stack.shape[-1] for stack in stacks]
    counts = [math.prod(stack.shape[:-2]) for stack in stacks]
    target = _common_sizes(sizes, counts)
    joined, parts = _joined([_padded(stack, target[size]) for stack, size in zip(stacks, sizes, strict=True)])
    # Where the numbers of a joined stack stand among those of all matrices.
    starts = np.cumsum([0, *counts])
    order = [
        np.concatenate([np.arange(starts[k], starts[k + 1]) for k, part in enumerate(parts) if part.number == index])
        for index in range(len(joined))
    ]
    least = 4 * jnp.finfo(traces.dtype).eps * scale * traces
    numbers = jnp.stack([scale, jnp.maximum(wanted, least)])[:, np.concatenate(order)]
    ends = np.cumsum([len(own) for own in order])
    found: list[Array] = []
    for matrices, end in zip(joined, ends, strict=True):
        own = numbers[:, end - len(matrices) : end, None, None].astype(matrices.dtype)
        identity = jnp.eye(matrices.shape[-1], dtype=matrices.dtype)[None]
        found.append(_inverse(own[0] * matrices + own[1] * identity))
    # Where a factorisation fails, all entries are NaN.
    first = jnp.concatenate([inverses[:, 0, 0].astype(traces.dtype) for inverses in found])
    is_finite = jnp.isfinite(first)[np.argsort(np.concatenate(order))]
    crop = lambda stack, part: found[part.number][part.rows, : stack.shape[-1], : stack.shape[-1]].reshape(stack.shape)
    return [crop(*pair) for pair in zip(stacks, parts, strict=True)], wanted >= least, is_finite


def _common_sizes(sizes: Sequence[int], counts: Sequence[int]) -> dict[int, int]:
    """The size to which matrices of each size are padded."""
    num_matrices = dict.fromkeys(sorted(sizes, reverse=True), 0)
    for size, count in zip(sizes, counts, strict=True):
        num_matrices[size] += count

    def fits(size: int, larger: int) -> bool:
        is_small = 1 < size and larger <= SMALL and num_matrices[size] * larger**2 <= MAX_PADDED_ENTRIES
        return size == larger or size > PADDING * larger or is_small

    return {size: next(k for k in num_matrices if k >= size and fits(size, k)) for size in num_matrices}


def _padded(matrices: Float[Array, "... k k"], size: int) -> Float[Array, "... l l"]:
    own = matrices.shape[-1]
    return jnp.pad(matrices, [(0, 0)] * (matrices.ndim - 2) + [(0, size - own)] * 2) if own < size else matrices


def _inverse(matrices: Float[Array, "m k k"]) -> Float[Array, "m k k"]:
    if matrices.shape[-1] == 1:
        return jnp.where(matrices > 0, 1 / matrices, jnp.nan)
    return _linalg.inverse(matrices)
