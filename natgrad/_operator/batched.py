"""Factorisations of many matrices, those of one size in one call."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from natgrad._operator.base import Eigen

# How large a matrix has to be, next to a larger one, to be padded to its size; below some size all are.
PADDING = 0.95
SMALL = 128


def eigens(stacks: Sequence[Array]) -> list[Eigen]:
    """Eigenvalues and eigenvectors of stacks of semidefinite matrices."""
    return batched(eigen, stacks)


def batched(function: Callable[[Array], Any], stacks: Sequence[Array]) -> list[Any]:
    """`function` of every stack of matrices, called once for all that have the same size and dtype."""
    joined, parts = _joined(stacks)
    results: list[Any] = []
    for matrices in joined:
        results.append(function(_after(results[-1] if results else None, matrices)))
    own = lambda stack, part: jax.tree.map(
        lambda x: x[part.rows].reshape(*stack.shape[:-2], *x.shape[1:]), results[part.index]
    )
    return [own(stack, part) for stack, part in zip(stacks, parts, strict=True)]


class _Part(NamedTuple):
    """Where a stack is among the joined ones."""

    index: int
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


def _after(previous: Any, matrices: Float[Array, "m k k"]) -> Float[Array, "m k k"]:
    """The same matrices, for a call that waits for the results of another.

    Calls of LAPACK in one program run at the same time on CPUs (JAX 0.10), and those for Cholesky factors have then
    been seen to wait for each other forever. No number is above infinity, but compilers do not know."""
    if previous is None:
        return matrices
    first = jax.tree.leaves(previous)[0].reshape(-1)[0]
    return matrices + (first > jnp.inf).astype(matrices.dtype)


def eigen(matrices: Float[Array, "m k k"]) -> Eigen:
    """Eigenvalues and eigenvectors of semidefinite matrices. Eigenvalues that cannot be told from zero are zero."""
    if matrices.shape[-1] == 1:
        return Eigen(jnp.maximum(matrices[:, 0], 0.0), jnp.ones_like(matrices))
    values, vectors = jnp.linalg.eigh((matrices + matrices.mT) / 2)
    return Eigen(without_rounding(values, matrices.shape[-1]), vectors)


def without_rounding(values: Float[Array, "m ..."], size: int) -> Float[Array, "m ..."]:
    """Eigenvalues, with zero in place of those that are rounding next to the largest of a matrix of the given size."""
    largest = jnp.max(values, axis=tuple(range(1, values.ndim)), keepdims=True)
    return jnp.where(values <= size * jnp.finfo(values.dtype).eps * largest, 0.0, values)


def damped_inverses(
    stacks: Sequence[Array], damping: Callable[[Array], tuple[Array, Array]]
) -> tuple[list[Array], Bool[Array, " m"], Bool[Array, " m"]]:
    r"""Inverses $(s F + d I)^{-1}$ of semidefinite matrices by their Cholesky factors, for scales $s$ and damping $d$
    that are a function of the mean eigenvalues of all matrices, in the order of the stacks; and for every matrix whether it
    was definite, and whether the inverse is finite.

    A matrix that is definite only beyond rounding has none. It is taken once more with as much on its diagonal as can
    be told from zero. Matrices of almost the same size are padded to the largest of them and go together, and numbers
    that belong to matrices are handled as one vector: every operation costs time to compile."""
    sizes = [stack.shape[-1] for stack in stacks]
    target = _common_sizes(sizes)
    joined, parts = _joined([_padded(stack, target[size]) for stack, size in zip(stacks, sizes, strict=True)])
    counts = [int(np.prod(stack.shape[:-2])) for stack in stacks]
    # Where the numbers of a joined stack stand among those of all matrices.
    starts = np.cumsum([0, *counts])
    order = [
        np.concatenate([np.arange(starts[k], starts[k + 1]) for k, part in enumerate(parts) if part.index == index])
        for index in range(len(joined))
    ]
    dtype = np.result_type(*(matrices.dtype for matrices in joined))
    traces = jnp.concatenate([_traces(matrices).astype(dtype) for matrices in joined])[
        np.argsort(np.concatenate(order))
    ]
    scale, shift = damping(traces / np.repeat(sizes, counts).astype(dtype))
    rounding = 4 * jnp.finfo(dtype).eps * (scale * traces + shift)

    # A loop over all sizes together, so that they are compiled once.
    def attempt(state):
        tries, lift, _ = state
        found: list[Array] = []
        for matrices, own in zip(joined, order, strict=True):
            added = jnp.eye(matrices.shape[-1], dtype=dtype)[None] * (shift + lift)[own][:, None, None]
            damped = (scale[own][:, None, None] * matrices + added).astype(matrices.dtype)
            found.append(_by_cholesky(_after(found[-1] if found else None, damped)))
        return tries + 1, jnp.where(succeeded(found), lift, rounding), found

    def succeeded(found):
        # Where a factorisation fails, all entries are NaN.
        each = jnp.concatenate([jnp.sum(own[:, 0], axis=1).astype(dtype) for own in found])
        return jnp.isfinite(each[np.argsort(np.concatenate(order))])

    def unfinished(state):
        tries, lift, _ = state
        return (tries == 0) | ((tries == 1) & ~jnp.all(lift == 0))

    _, lift, found = jax.lax.while_loop(unfinished, attempt, (jnp.array(0), jnp.zeros_like(traces), joined))
    crop = lambda stack, part: found[part.index][part.rows, : stack.shape[-1], : stack.shape[-1]].reshape(stack.shape)
    is_finite = succeeded(found)
    return [crop(*pair) for pair in zip(stacks, parts, strict=True)], (lift == 0) & is_finite, is_finite


def _common_sizes(sizes: Iterable[int]) -> dict[int, int]:
    """The size to which matrices of each size are padded."""
    ordered = sorted(set(sizes), reverse=True)
    fits = lambda size, larger: size == larger or size > PADDING * larger or (1 < size and larger <= SMALL)
    return {size: next(larger for larger in ordered if larger >= size and fits(size, larger)) for size in ordered}


def _padded(matrices: Float[Array, "... k k"], size: int) -> Float[Array, "... l l"]:
    own = matrices.shape[-1]
    return jnp.pad(matrices, [(0, 0)] * (matrices.ndim - 2) + [(0, size - own)] * 2) if own < size else matrices


def _traces(matrices: Float[Array, "m k k"]) -> Float[Array, " m"]:
    # Every so many entries is faster to compile than `jnp.trace`.
    count, size, _ = matrices.shape
    return jnp.sum(matrices.reshape(count, size * size)[:, :: size + 1], axis=1)


def _by_cholesky(matrices: Float[Array, "m k k"]) -> Float[Array, "m k k"]:
    if matrices.shape[-1] == 1:
        return jnp.where(matrices > 0, 1 / matrices, jnp.nan)
    identity = jnp.eye(matrices.shape[-1], dtype=matrices.dtype)
    # The transposes change nothing but the order in memory, which LAPACK takes as it is.
    roots = jax.lax.linalg.cholesky(matrices.mT, symmetrize_input=False)
    return jax.vmap(lambda root: jax.scipy.linalg.cho_solve((root, True), identity))(roots).mT
