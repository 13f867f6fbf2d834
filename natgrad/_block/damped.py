r"""Inverses of damped blocks. The damping of a Kronecker product is split between its two factors.

Numbers are kept in flat vectors of three kinds, because every operation on an array takes time to compile: one number
for each block; one for each factor (a factor of one group of a block); one for each matrix (a factor in blocks has
several matrices). `FactorIndex` says which belongs to which."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from natgrad._block import factor
from natgrad._block.base import AbstractBlock
from natgrad._block.stacks import damped_inverses


class FactorIndex(NamedTuple):
    """Which matrix belongs to which factor, and which factor to which block.

    - `block`: for every factor, the number of its block.
    - `other`: for every factor, the number of the other factor of its product; its own number if there is none.
    - `factor`: for every matrix, the number of its factor."""

    block: np.ndarray
    other: np.ndarray
    factor: np.ndarray

    def summed(self, numbers: Float[Array, " matrices"]) -> Float[Array, " factors"]:
        """For every factor, the sum over its matrices."""
        if len(self.factor) == len(self.block):
            return numbers
        return jax.ops.segment_sum(numbers, self.factor, len(self.block), indices_are_sorted=True)

    def spread(self, numbers: Float[Array, " factors"]) -> Float[Array, " matrices"]:
        """For every matrix, the number that belongs to its factor."""
        return numbers if len(self.factor) == len(self.block) else numbers[self.factor]


class BlockInverses(NamedTuple):
    """The inverses of damped blocks.

    - `is_definite`: whether no matrix of the block needed more damping than was asked for.
    - `is_finite`: whether the inverse is finite."""

    blocks: list[AbstractBlock]
    is_definite: Bool[Array, " blocks"]
    is_finite: Bool[Array, " blocks"]


def invert(
    blocks: Sequence[AbstractBlock], damping: Float[Array, " blocks"], traces: Float[Array, " matrices"] | None = None
) -> BlockInverses:
    r"""The inverse of every damped block. `traces` of their matrices are computed if they are not given.

    A product $A \otimes B$ is damped by its factors,
    $(A + \pi\sqrt\lambda I) \otimes (B + \frac{\sqrt\lambda}{\pi} I)$ with $\pi^2$ the ratio of the mean eigenvalues of
    $A$ and $B$ (blocks of zeros left out). This is more damping than $\lambda I$, but a Kronecker product again. If a
    factor is zero, the block is zero, and the damped block is $\lambda I$."""
    matrices = [block.matrices() for block in blocks]
    stacks = [stack for block_matrices in matrices for stack in block_matrices]
    if not stacks:
        inverted = [block.inverted([], damping[k]) for k, block in enumerate(blocks)]
        return BlockInverses(inverted, jnp.ones(len(blocks), bool), _are_finite(blocks, damping))
    index = factor_index(blocks)
    traces = factor.traces(stacks) if traces is None else traces
    scale, shares = _split_damping(index, stacks, traces, damping)
    inverses, is_definite, is_finite = damped_inverses(stacks, traces, scale, shares)
    remaining = iter(inverses)
    inverted = [
        block.inverted([next(remaining) for _ in block_matrices], damping[k])
        for k, (block, block_matrices) in enumerate(zip(blocks, matrices, strict=True))
    ]
    in_block = index.block[index.factor][None, :] == np.arange(len(blocks))[:, None]

    def all_in_block(flags: Bool[Array, " matrices"]) -> Bool[Array, " blocks"]:
        return jnp.all(flags[None, :] | ~in_block, axis=1)

    return BlockInverses(inverted, all_in_block(is_definite), all_in_block(is_finite) & _are_finite(blocks, damping))


def _split_damping(
    index: FactorIndex, stacks: Sequence[Array], traces: Float[Array, " matrices"], damping: Float[Array, " blocks"]
) -> tuple[Float[Array, " matrices"], Float[Array, " matrices"]]:
    """For every matrix, the number it is multiplied by (zero or one), and the number added to its diagonal."""
    counts = [math.prod(stack.shape[:-2]) for stack in stacks]
    sizes = np.repeat([stack.shape[-1] for stack in stacks], counts).astype(traces.dtype)
    # In a diagonal factor, rows of a table that no example reads do not count, however many they are.
    rows = index.summed(jnp.where(traces > 0, sizes, 0.0))
    means = index.summed(traces) / jnp.maximum(rows, 1.0)
    other_means = means[index.other]
    damping_by_factor = damping[index.block].astype(means.dtype)
    is_product = index.other != np.arange(len(index.other))
    is_zero = is_product & ((means <= 0) | (other_means <= 0))
    ratio = jnp.where(is_zero, 1.0, means) / jnp.where(is_zero, 1.0, other_means)
    shares = jnp.where(is_product, jnp.sqrt(damping_by_factor * ratio), damping_by_factor)
    return index.spread(1.0 - is_zero.astype(means.dtype)), index.spread(shares)


def _are_finite(blocks: Sequence[AbstractBlock], damping: Float[Array, " blocks"]) -> Bool[Array, " blocks"]:
    """Whether blocks without matrices and all dampings are finite. `damped_inverses` checks matrices."""
    flags = [jnp.array(True) if block.matrices() else jnp.all(jnp.isfinite(block.diagonal())) for block in blocks]
    return jnp.stack(flags) & jnp.isfinite(damping)


def factor_index(blocks: Sequence[AbstractBlock]) -> FactorIndex:
    """The index of the factors and matrices of blocks, in their order."""
    owners: list[int] = []
    others: list[int] = []
    factors: list[np.ndarray] = []
    for index, block in enumerate(blocks):
        matrices = block.matrices()
        for k, matrix in enumerate(matrices):
            groups = matrix.shape[0]
            numbers = np.arange(len(owners), len(owners) + groups)
            factors.append(np.repeat(numbers, int(np.prod(matrix.shape[1:-2]))))
            others += (numbers + (groups if k == 0 else -groups) if block.is_product else numbers).tolist()
            owners += [index] * groups
    return FactorIndex(np.array(owners), np.array(others), np.concatenate(factors))
