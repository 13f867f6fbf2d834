"""Factorisations of many symmetric matrices, in stacks `... k k`."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from natgrad import _linalg
from natgrad._block.base import Eigen

# Matrices are padded to a common size before they are inverted, because XLA compiles the operations around LAPACK calls
# anew for every size: inverses of 16 matrices of 7 sizes take 1.4 s to trace and compile, 2.8 s unpadded, and 0.84 ms
# to run, 0.6 ms unpadded (JAX 0.10.1, CPU). Where sizes are nearly equal it does not pay (32 matrices of 50 and 51
# rows: 1.7 s to compile, 0.7 s unpadded). Look again when compiling gets faster: unpadded matrices are simpler.
# Reproduced by `test_inverses_are_padded_to_common_sizes`.
#
# Matrices with at least this fraction of the rows of larger ones are padded to their size.
PADDING = 0.95
# Matrices are also padded, whatever their size, to at most `SMALL` rows, if the padded ones have few entries in all:
# 1,024 matrices of 2 rows take 350 ms if they are padded to 128 rows, and 1 ms if not.
SMALL = 128
MAX_PADDED_ENTRIES = 2**16


def eigen(stack: Float[Array, "*stack k k"]) -> Eigen:
    """Eigenvalues and eigenvectors of semidefinite matrices. Eigenvalues within rounding of zero are zero."""
    size = stack.shape[-1]
    if size == 1:
        return Eigen(jnp.maximum(stack[..., 0], 0.0), jnp.ones_like(stack))
    values, vectors = _linalg.eigh((stack + stack.mT) / 2)
    return Eigen(without_rounding(values.reshape(-1, size), size).reshape(values.shape), vectors)


class _Slot(NamedTuple):
    """Where the matrices of a stack are: rows of a joined stack, and its number."""

    number: int
    rows: slice


def _join(stacks: Sequence[Array]) -> tuple[list[Array], list[_Slot]]:
    """Join all stacks of matrices with one size and dtype into one stack `m k k`."""
    by_kind: dict[Any, list[Array]] = {}
    slots = []
    for stack in stacks:
        kind = stack.shape[-1], stack.dtype
        flat = stack.reshape(-1, *stack.shape[-2:])
        start = sum(map(len, by_kind.setdefault(kind, [])))
        by_kind[kind].append(flat)
        slots.append(_Slot(list(by_kind).index(kind), slice(start, start + len(flat))))
    return [jnp.concatenate(flats) if len(flats) > 1 else flats[0] for flats in by_kind.values()], slots


def without_rounding(values: Float[Array, "m ..."], size: int) -> Float[Array, "m ..."]:
    """Set eigenvalues of matrices with `size` rows to zero if they are within rounding of it, next to the largest."""
    largest = jnp.max(values, axis=tuple(range(1, values.ndim)), keepdims=True)
    return jnp.where(values <= size * jnp.finfo(values.dtype).eps * largest, 0.0, values)


def damped_inverses(
    stacks: Sequence[Array], traces: Float[Array, " m"], scale: Float[Array, " m"], damping: Float[Array, " m"]
) -> tuple[list[Array], Bool[Array, " m"], Bool[Array, " m"]]:
    r"""Inverses $(s F + d I)^{-1}$ of semidefinite matrices, by Cholesky factorisation.

    Traces, scales $s$ and damping $d$ are numbers for all matrices, in the order of the stacks. Damping within rounding
    of zero is raised above it. Also returns, for every matrix, whether that was not necessary, and whether the inverse
    is finite.

    Matrices that are padded to the same size are inverted together."""
    sizes = [stack.shape[-1] for stack in stacks]
    counts = [math.prod(stack.shape[:-2]) for stack in stacks]
    padded_sizes = _padded_sizes(sizes, counts)
    joined, slots = _join([_pad(stack, padded_sizes[size]) for stack, size in zip(stacks, sizes, strict=True)])
    # For every matrix in the order of the joined stacks, its number in the order of `stacks`.
    starts = np.cumsum([0, *counts])
    order = np.concatenate(
        [
            np.arange(starts[k], starts[k + 1])
            for number in range(len(joined))
            for k, slot in enumerate(slots)
            if slot.number == number
        ]
    )
    least = 4 * jnp.finfo(traces.dtype).eps * scale * traces
    numbers = jnp.stack([scale, jnp.maximum(damping, least)])[:, order]
    ends = np.cumsum([len(matrices) for matrices in joined])
    inverses: list[Array] = []
    for matrices, end in zip(joined, ends, strict=True):
        s, d = numbers[:, end - len(matrices) : end, None, None].astype(matrices.dtype)
        identity = jnp.eye(matrices.shape[-1], dtype=matrices.dtype)[None]
        inverses.append(_inverse(s * matrices + d * identity))
    # Where a factorisation fails, all entries are NaN, so one entry tells.
    first_entries = jnp.concatenate([stack[:, 0, 0].astype(traces.dtype) for stack in inverses])
    is_finite = jnp.isfinite(first_entries)[np.argsort(order)]

    def crop(stack: Array, slot: _Slot) -> Array:
        size = stack.shape[-1]
        return inverses[slot.number][slot.rows, :size, :size].reshape(stack.shape)

    return [crop(*pair) for pair in zip(stacks, slots, strict=True)], damping >= least, is_finite


def _padded_sizes(sizes: Sequence[int], counts: Sequence[int]) -> dict[int, int]:
    """The size to which matrices of each size are padded."""
    num_matrices = dict.fromkeys(sorted(sizes, reverse=True), 0)
    for size, count in zip(sizes, counts, strict=True):
        num_matrices[size] += count

    def fits(size: int, larger: int) -> bool:
        is_small = 1 < size and larger <= SMALL and num_matrices[size] * larger**2 <= MAX_PADDED_ENTRIES
        return size == larger or size > PADDING * larger or is_small

    return {size: next(k for k in num_matrices if k >= size and fits(size, k)) for size in num_matrices}


def _pad(matrices: Float[Array, "... k k"], size: int) -> Float[Array, "... l l"]:
    """Matrices with zeros below and to the right, up to the given size."""
    missing = size - matrices.shape[-1]
    return jnp.pad(matrices, [(0, 0)] * (matrices.ndim - 2) + [(0, missing)] * 2) if missing else matrices


def _inverse(matrices: Float[Array, "m k k"]) -> Float[Array, "m k k"]:
    """The inverses of matrices, NaN for those that are not positive definite."""
    if matrices.shape[-1] == 1:
        return jnp.where(matrices > 0, 1 / matrices, jnp.nan)
    return _linalg.inverse(matrices)
