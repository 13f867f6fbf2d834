"""From points to a metric made of blocks, for one call of `kfac` and for every step of `KFAC`: choose estimators, sum
moments over examples, join terms."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from natgrad import _tree
from natgrad._block.base import AbstractBlock, AbstractEstimator
from natgrad._block.choose import choose
from natgrad._block.corrected import EigenvalueEstimator
from natgrad._block.eigen import EigenBlock
from natgrad._block.entries import BlockEntries
from natgrad._block.factor import Factor
from natgrad._block.kronecker import KroneckerBlock, KroneckerEstimator, with_partial_traces
from natgrad._block.masks import check_mask, mask_outputs
from natgrad._block.rules import BlockRules
from natgrad._block.stacks import eigen
from natgrad._block.structure_report import StructureReport, make_report
from natgrad._block.unfactored import ZeroEstimator
from natgrad._check import caller
from natgrad._metric.block_metric import BlockMetric, Blocks
from natgrad._point.point import Point
from natgrad._point.records import SiteRecords, summed
from natgrad._types import Output

# The eigenvectors of both factors of a block, by the entries of parameters that the block covers.
Bases = Mapping[BlockEntries, tuple[Factor, Factor]]


def estimate(point: Point, columns: Output, rules: BlockRules, *, is_corrected: bool) -> "BlockEstimate":
    """An estimator for every block of a point's metric. With `is_corrected` Kronecker blocks await their bases."""
    masks = check_mask(point.map.batch)
    columns = mask_outputs(masks, columns)
    return BlockEstimate(point, columns, choose(point.program, point.uses, rules, masks, corrected=is_corrected))


class BlockEstimate(NamedTuple):
    """What the blocks of a metric are computed from: a point, columns of the metrics of its outputs, and an estimator
    for every block."""

    point: Point
    columns: Output
    estimators: list[AbstractEstimator]

    def with_bases(self, bases: Bases) -> "BlockEstimate":
        """Corrected eigenvalues in given bases, where there is one, in place of Kronecker factors."""

        def in_basis(estimator: AbstractEstimator) -> AbstractEstimator:
            if not awaits_basis(estimator) or estimator.place not in bases:
                return estimator
            place, reason, is_fallback = estimator.place, estimator.reason, estimator.is_fallback
            return EigenvalueEstimator(place, reason, is_fallback, estimator, *bases[place])  # pyright: ignore

        return self._replace(estimators=[in_basis(estimator) for estimator in self.estimators])

    def bases(self) -> Bases:
        """The eigenvectors of the Kronecker factors at this point."""
        awaiting = [estimator for estimator in self.estimators if awaits_basis(estimator)]
        blocks = self._replace(estimators=awaiting).blocks()
        return eigenvectors({estimator.place: block for estimator, block in zip(awaiting, blocks, strict=True)})

    def blocks(self) -> list[AbstractBlock]:
        """The blocks, from sums over examples and columns, as many columns at a time as the budget allows."""
        point, columns, budget = self.point, self.columns, self.point.map.budget

        def sums(columns: Output) -> list:
            records = self._records(columns)
            return [estimator.of_cotangents(records, budget) for estimator in self.estimators]

        total = summed(sums, columns, point.column_chunk(columns))
        cotangent_moments = jax.tree.map(lambda leaf: leaf / point.num_examples, total)
        # Inputs are the same for all columns.
        first = self._records(jax.tree.map(lambda s: s[:1], columns))
        pairs = list(zip(self.estimators, cotangent_moments, strict=True))
        input_moments = [estimator.of_inputs(first, moment, budget) for estimator, moment in pairs]
        moments = zip(self.estimators, input_moments, cotangent_moments, strict=True)
        return [estimator.block(inputs, cotangents) for estimator, inputs, cotangents in moments]

    def metric(self, blocks: Sequence[AbstractBlock]) -> BlockMetric:
        """The metric at this point, made of its blocks."""
        program = self.point.program
        leaves, treedef = jax.tree.flatten(program.params)
        places = tuple(estimator.place for estimator in self.estimators)
        operator = Blocks(tuple(blocks), places, (tuple(leaves), treedef))
        report = make_report(program, self.point.uses, self.estimators, list(blocks))
        return BlockMetric(operator, report, jnp.asarray(self.point.total_weight, float))

    def _records(self, columns: Output) -> SiteRecords:
        records = self.point.per_example(columns, is_stacked=True).recording()
        return replace(records, weights=self.point.example_weights())


def awaits_basis(estimator: AbstractEstimator) -> bool:
    return isinstance(estimator, KroneckerEstimator) and estimator.is_corrected


def eigenvectors(blocks: Mapping[BlockEntries, AbstractBlock]) -> Bases:
    """The eigenvectors of the two factors of every block."""

    def basis(block: AbstractBlock) -> tuple[Factor, Factor]:
        if isinstance(block, EigenBlock):
            return block.input_basis, block.output_basis
        inputs, outputs = block.matrices()
        return eigen(inputs).vectors, eigen(outputs).vectors

    return {place: basis(block) for place, block in blocks.items()}


def joined(estimates: Sequence[BlockEstimate]) -> BlockMetric:
    """The metric of all terms. A sum of Kronecker products is replaced by one product with the same partial traces."""
    blocks = [of_term.blocks() for of_term in estimates]
    metrics = [of_term.metric(its_blocks) for of_term, its_blocks in zip(estimates, blocks, strict=True)]
    if len(metrics) == 1:
        return metrics[0]
    by_place: dict[BlockEntries, list[AbstractBlock]] = {}
    unused: dict[BlockEntries, AbstractBlock] = {}
    for of_term, its_blocks in zip(estimates, blocks, strict=True):
        for estimator, block in zip(of_term.estimators, its_blocks, strict=True):
            if isinstance(estimator, ZeroEstimator):
                unused[estimator.place] = block
            else:
                by_place.setdefault(estimator.place, []).append(block)
    # Parameters that no output of a term depends on are left to the other terms.
    covered = {part.leaf for place in by_place for part in place.parts}
    alone = {place: [block] for place, block in unused.items() if not covered & {part.leaf for part in place.parts}}
    places = {**by_place, **alone}
    _check_cover(places, metrics[0])
    operator = Blocks(tuple(map(_sum, places.values())), tuple(places), metrics[0].operator.structure)
    return BlockMetric(operator, _joined_report(metrics), metrics[0].num_examples)


def _joined_report(metrics: Sequence[BlockMetric]) -> StructureReport:
    """For every parameter the row of a term that fell back, or else of one that depends on the parameter."""
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
        return with_partial_traces([(block.A, block.B) for block in blocks if isinstance(block, KroneckerBlock)])
    if isinstance(blocks[0], EigenBlock):
        return with_values(blocks[0], _tree.sum_leaves([block.values for block in blocks]))  # pyright: ignore
    return _tree.add(*blocks)


def with_values(block: Any, values: Array) -> AbstractBlock:
    """A block with other eigenvalues, in the same basis."""
    return eqx.tree_at(lambda block: block.values, block, values)
