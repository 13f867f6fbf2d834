r"""Inverses of damped blocks, with the damping of a Kronecker product shared between its factors."""

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
    """For every factor (of a block, and of one of its groups) its block and the other factor of its product, itself if
    there is none; and for every matrix the factor it belongs to. A factor in blocks has several matrices."""

    block: np.ndarray
    other: np.ndarray
    factor: np.ndarray

    def summed(self, numbers: Float[Array, " matrices"]) -> Float[Array, " factors"]:
        """The sums over the matrices of every factor."""
        if len(self.factor) == len(self.block):
            return numbers
        return jax.ops.segment_sum(numbers, self.factor, len(self.block), indices_are_sorted=True)

    def spread(self, numbers: Float[Array, " factors"]) -> Float[Array, " matrices"]:
        """The number of its factor for every matrix."""
        return numbers if len(self.factor) == len(self.block) else numbers[self.factor]


class BlockInverses(NamedTuple):
    """Inverses, whether each was found without lifting a matrix above rounding, and whether those of its matrices are
    finite."""

    blocks: list[AbstractBlock]
    is_definite: Bool[Array, " blocks"]
    is_finite: Bool[Array, " blocks"]


def invert(
    blocks: Sequence[AbstractBlock], damping: Float[Array, " blocks"], traces: Float[Array, " matrices"] | None = None
) -> BlockInverses:
    r"""The inverse of every damped block, with the traces of their matrices if they are known.

    A product $A \otimes G$ is damped by its factors,
    $(A + \pi\sqrt\lambda I) \otimes (G + \frac{\sqrt\lambda}{\pi} I)$ with $\pi^2$ the ratio of the mean eigenvalues of
    $A$ and $G$ (blocks of zeros left out): more damping than $\lambda I$, but a Kronecker product again. Where one
    factor is zero the product is, and the damped block is $\lambda I$."""
    matrices = [block.matrices() for block in blocks]
    stacks = [matrix for own in matrices for matrix in own]
    if not stacks:
        each = [block.inverted([], damping[k]) for k, block in enumerate(blocks)]
        return BlockInverses(each, jnp.ones(len(blocks), bool), _are_finite(blocks, damping))
    where = factor_index(blocks)
    traces = factor.traces(stacks) if traces is None else traces
    found, is_definite, is_finite = damped_inverses(stacks, traces, *_shares(where, stacks, traces, damping))
    each = iter(found)
    inverted = [
        block.inverted([next(each) for _ in own], damping[k])
        for k, (block, own) in enumerate(zip(blocks, matrices, strict=True))
    ]
    is_own = (where.block[where.factor][None, :] == np.arange(len(blocks))[:, None]).astype(np.float32)
    of_block = lambda flags: jnp.asarray(is_own) @ (~flags).astype(is_own.dtype) == 0
    return BlockInverses(inverted, of_block(is_definite), of_block(is_finite) & _are_finite(blocks, damping))


def _shares(
    where: FactorIndex, stacks: Sequence[Array], traces: Float[Array, " matrices"], damping: Float[Array, " blocks"]
) -> tuple[Float[Array, " matrices"], Float[Array, " matrices"]]:
    """What every matrix is multiplied by, and what is added to its diagonal."""
    counts = [math.prod(stack.shape[:-2]) for stack in stacks]
    sizes = np.repeat([stack.shape[-1] for stack in stacks], counts).astype(traces.dtype)
    # In a diagonal factor, rows of a table that no example reads do not count, however many they are.
    rows = where.summed(jnp.where(traces > 0, sizes, 0.0))
    means = where.summed(traces) / jnp.maximum(rows, 1.0)
    others = means[where.other]
    own = damping[where.block].astype(means.dtype)
    is_product = where.other != np.arange(len(where.other))
    is_zero = is_product & ((means <= 0) | (others <= 0))
    ratio = jnp.where(is_zero, 1.0, means) / jnp.where(is_zero, 1.0, others)
    share = jnp.where(is_product, jnp.sqrt(own * ratio), own)
    return where.spread(1.0 - is_zero.astype(means.dtype)), where.spread(share)


def _are_finite(blocks: Sequence[AbstractBlock], damping: Float[Array, " blocks"]) -> Bool[Array, " blocks"]:
    """Whether the blocks that have no matrices are finite: those of others are looked at where they are inverted."""
    known = lambda block: jnp.array(True) if block.matrices() else jnp.all(jnp.isfinite(block.diagonal()))
    return jnp.stack([known(block) for block in blocks]) & jnp.isfinite(damping)


def factor_index(blocks: Sequence[AbstractBlock]) -> FactorIndex:
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
