"""What structures with Kronecker factors have in common: how a step measures the factors, and damps the blocks."""

from collections.abc import Sequence

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad._block.rules import BlockRules
from natgrad._block.structure_report import check_fallbacks
from natgrad._check import caller
from natgrad._metric.block_metric import BlockMetric
from natgrad._metric.estimated_blocks import BlockEstimate, estimate
from natgrad._optimiser.cost import TermPoint
from natgrad._optimiser.damping import DampingMatrix
from natgrad._optimiser.structure.base import AbstractStructure
from natgrad._types import Key


class AbstractFactoredStructure(AbstractStructure):
    """A structure made of Kronecker factors, which are averaged over steps."""

    num_samples: eqx.AbstractVar[int]
    blocks: eqx.AbstractVar[BlockRules]

    @property
    def has_sites(self):
        return True

    @property
    def uses_masks(self):
        return True

    def inspect(self, state):
        check_fallbacks(self.report(state), self.blocks)

    def _estimates(
        self, points: Sequence[TermPoint], key: Key | None, *, is_corrected: bool = False
    ) -> list[BlockEstimate]:
        """What the blocks of every term are computed from."""
        estimates = []
        for number, term_point in enumerate(points):
            columns = term_point.columns(key, self.num_samples, number)
            estimates.append(estimate(term_point.point, columns, self.blocks, is_corrected=is_corrected))
        return estimates


def block_damping(metric: BlockMetric, damping: DampingMatrix) -> Float[Array, " blocks"]:
    """What is added to the diagonal of every block; with relative damping, in units of the block's diagonal."""
    names = list(metric.report())
    strengths = []
    for place in metric.operator.places:
        leaves = [part.leaf for part in place.parts]
        if not damping.is_shared(leaves):
            raise ValueError(
                f"{caller()}: {', '.join(f'`{names[leaf]}`' for leaf in leaves)} share a block, but have different "
                "damping multipliers or `l2`. Give them the same, or blocks of their own: "
                '`KFAC(blocks=BlockRules(bias="separate"))`.'
            )
        strengths.append(jnp.asarray(damping.of_block(leaves[0]), float))
    return jnp.stack(strengths)
