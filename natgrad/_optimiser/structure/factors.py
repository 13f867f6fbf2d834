"""Kronecker factors as a step measures them: on a fraction of its batches, of one term or of several."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from natgrad import _tree
from natgrad._block.base import AbstractBlock, AbstractEstimator
from natgrad._block.eigen import EigenBlock
from natgrad._block.entries import BlockEntries
from natgrad._block.kronecker import KroneckerBlock, nearest
from natgrad._block.rules import BlockRules
from natgrad._block.structure_report import StructureReport
from natgrad._block.unfactored import ZeroEstimator
from natgrad._check import caller
from natgrad._metric.block_metric import BlockMetric, Blocks
from natgrad._metric.estimated_blocks import FactorData, factor_data
from natgrad._optimiser.cost import TermPoint
from natgrad._optimiser.damping import DampingMatrix
from natgrad._types import Key


class FactorEstimate(NamedTuple):
    """A term at a point with the cotangents of its outputs, and the blocks to compute from them."""

    data: FactorData
    estimators: list[AbstractEstimator]

    def blocks(self) -> list[AbstractBlock]:
        return self.data.blocks(self.estimators)


def measure(
    points: Sequence[TermPoint], key: Key | None, rules: BlockRules, num_samples: int, *, corrected: bool
) -> list[FactorEstimate]:
    """What blocks are computed from, for every term."""
    estimates = []
    for number, term_point in enumerate(points):
        point, columns = term_point.point, term_point.columns(key, num_samples, number)
        estimates.append(FactorEstimate(*factor_data(point, columns, rules, is_corrected=corrected)))
    return estimates


def join_terms(estimates: Sequence[FactorEstimate], blocks: Sequence[Sequence[AbstractBlock]]) -> BlockMetric:
    """The metric of all terms. The sum of several Kronecker products is replaced by the nearest one."""
    pairs = list(zip(estimates, blocks, strict=True))
    metrics = [estimate.data.metric(estimate.estimators, list(of_term)) for estimate, of_term in pairs]
    if len(metrics) == 1:
        return metrics[0]
    by_place: dict[BlockEntries, list[AbstractBlock]] = {}
    unused: dict[BlockEntries, AbstractBlock] = {}
    for estimate, of_term in pairs:
        for estimator, block in zip(estimate.estimators, of_term, strict=True):
            if isinstance(estimator, ZeroEstimator):
                unused[estimator.place] = block
            else:
                by_place.setdefault(estimator.place, []).append(block)
    # What no output of a term depends on is left to the other terms.
    covered = {part.leaf for place in by_place for part in place.parts}
    alone = {place: [block] for place, block in unused.items() if not covered & {part.leaf for part in place.parts}}
    places = {**by_place, **alone}
    _check_cover(places, metrics[0])
    operator = Blocks(tuple(map(_sum, places.values())), tuple(places), metrics[0].operator.structure)
    return BlockMetric(operator, _reported(metrics), metrics[0].num_examples)


def _reported(metrics: Sequence[BlockMetric]) -> StructureReport:
    """Of every parameter the worst that a term has to say, except that it does not depend on it."""
    rows = []
    for path, first in metrics[0].report().items():
        rows_of_path = [metric.report()[path] for metric in metrics]
        used = [row for row in rows_of_path if row.structure != "zero"] or [first]
        rows.append(next((row for row in used if row.is_fallback), used[0]))
    return StructureReport(tuple(rows))


def _check_cover(places: Mapping[BlockEntries, Any], metric: BlockMetric) -> None:
    """Refuse terms whose blocks overlap."""
    sizes = [_tree.size(leaf) for leaf in metric.operator.structure[0]]
    covered = np.zeros(len(sizes), int)
    for place in places:
        for part in place.parts:
            covered[part.leaf] += int(np.prod(part.block))
    bad = [f"`{name}`" for name, size, count in zip(metric.report(), sizes, covered, strict=True) if size != count]
    if bad:
        raise ValueError(
            f"{caller()} needs the same blocks in every term, but {', '.join(bad)} are used in different ways. Try "
            '`BlockRules(bias="separate")`, or structures by path (`BlockRules(structures={path: ...})`), or `Exact` '
            "or `Diagonal`."
        )


def _sum(blocks: Sequence[AbstractBlock]) -> AbstractBlock:
    if len(blocks) > 1 and isinstance(blocks[0], KroneckerBlock):
        return nearest([(block.A, block.G) for block in blocks if isinstance(block, KroneckerBlock)])
    if isinstance(blocks[0], EigenBlock):
        return with_values(blocks[0], _tree.sum_leaves([block.values for block in blocks]))  # pyright: ignore
    return _tree.add(*blocks)


def block_damping(metric: BlockMetric, damping: DampingMatrix) -> Float[Array, " blocks"]:
    """What is added to the diagonal of every block, in units of that diagonal where it is relative to it."""
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


def with_values(block: Any, values: Array) -> AbstractBlock:
    """A block with other eigenvalues, in the same basis."""
    return eqx.tree_at(lambda one: one.values, block, values)
