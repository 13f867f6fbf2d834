"""How metrics with Kronecker factors are computed: what was asked for, a forward pass, and sums over cotangents."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from natgrad._block.base import AbstractBlock, AbstractEstimator
from natgrad._block.choose import choose
from natgrad._block.corrected import EigenvalueEstimator
from natgrad._block.eigen import EigenBlock
from natgrad._block.factor import Factor
from natgrad._block.kronecker import KroneckerBlock, KroneckerEstimator
from natgrad._block.masks import check_mask, mask_outputs
from natgrad._block.rules import BlockRules
from natgrad._block.stacks import eigen
from natgrad._block.structure_report import make_report
from natgrad._check import caller, is_concrete
from natgrad._compile import compiled
from natgrad._metric.block_metric import BlockMetric, Blocks
from natgrad._model import finite
from natgrad._point.evaluate import Place, check_outputs_in, geometry_at, point_in
from natgrad._point.point import Point, check_num_samples
from natgrad._point.records import summed
from natgrad._types import Key, Output


class Request(NamedTuple):
    """What `kfac` or `ekfac` was asked for, beyond the point."""

    is_corrected: bool
    rules: BlockRules
    key: Key | None
    num_samples: int

    def build(self, place: Place, basis: BlockMetric | None = None) -> BlockMetric:
        check_num_samples(self.num_samples)
        geometry = geometry_at(place)
        check_mask(place.map.batch)
        metric, z = _computed(place, self.key, basis, self.num_samples, self.rules, self.is_corrected)
        check_outputs_in(geometry, z, place.map.batch)
        self._warn_of_fallbacks(metric)
        _require_finite(metric)
        return metric

    def _warn_of_fallbacks(self, metric: BlockMetric) -> None:
        report = metric.report()
        if report.fallbacks and self.rules.strict:
            raise ValueError(
                f"{caller()} with `strict=True` needs a structure for every parameter, but "
                f"{report.describe_fallbacks()}. Choose a structure for them: `BlockRules(structures={{path: ...}})`."
            )
        report.warn_of_fallbacks()


def _require_finite(metric: BlockMetric) -> None:
    """Refuse factors that are not finite, where they are known."""
    paths, operator = list(metric.report()), metric.operator
    if not is_concrete(operator):
        return
    are_finite = np.asarray(_are_finite(operator.blocks))
    bad = [paths[place.parts[0].leaf] for place, good in zip(operator.places, are_finite, strict=True) if not good]
    if bad:
        raise ValueError(
            f"{caller()} needs finite numbers in every factor, but the factors of "
            f"{', '.join(f'`{path}`' for path in bad)} are not. Look for NaN or infinity in "
            "`params` and `x`, or for an overflow in the gradients."
        )


@compiled
def _are_finite(blocks: Sequence[AbstractBlock]) -> Bool[Array, " blocks"]:
    return jnp.stack([finite(block).holds for block in blocks])


@compiled
def _computed(
    place: Place,
    key: Key | None,
    basis: BlockMetric | None,
    num_samples: int,
    rules: BlockRules,
    is_corrected: bool,
) -> tuple[BlockMetric, Output]:
    point = point_in(place)
    columns = point.refuse_coupled(point.columns(key, num_samples))
    data, estimators = factor_data(point, columns, rules, is_corrected=is_corrected)
    estimators = data.corrected(estimators, basis)
    return data.metric(estimators, data.blocks(estimators)), point.z


def factor_data(
    point: Point, columns: Output, rules: BlockRules, *, is_corrected: bool
) -> tuple["FactorData", list[AbstractEstimator]]:
    """What blocks are computed from, and how each of them is."""
    masks = check_mask(point.map.batch)
    data = FactorData(point, mask_outputs(masks, columns), point.example_weights())
    return data, choose(point.program, point.uses, rules, masks, corrected=is_corrected)


class FactorData(NamedTuple):
    """A point, the cotangents of its outputs, and how much each example counts."""

    point: Point
    columns: Output
    weights: Float[Array, " N"] | None

    def corrected(self, estimators: list[AbstractEstimator], basis: BlockMetric | None) -> list[AbstractEstimator]:
        """The estimators, with a basis where eigenvalues are to be corrected."""
        wanted = [estimator for estimator in estimators if is_corrected(estimator)]
        if not wanted:
            return estimators
        blocks = self.blocks(wanted) if basis is None else _given(basis, estimators)
        pairs = iter(bases(blocks))
        return [with_basis(one, *next(pairs)) if is_corrected(one) else one for one in estimators]

    def blocks(self, estimators: list[AbstractEstimator]) -> list[AbstractBlock]:
        """The blocks, from sums over examples and columns, as many columns at a time as the budget allows."""
        point, columns, budget = self.point, self.columns, self.point.map.budget
        recording = lambda part: replace(point.per_example(part, is_stacked=True).recording(), weights=self.weights)

        def sums(part: Output) -> list:
            here = recording(part)
            return [estimator.of_cotangents(here, budget) for estimator in estimators]

        total = summed(sums, columns, point.column_chunk(columns))
        mean = jax.tree.map(lambda leaf: leaf / point.num_examples, total)
        first = recording(jax.tree.map(lambda s: s[:1], columns))
        triples = []
        for estimator, cotangent_moment in zip(estimators, mean, strict=True):
            triples.append((estimator, estimator.of_inputs(first, cotangent_moment, budget), cotangent_moment))
        return [estimator.block(*moments) for estimator, *moments in triples]

    def metric(self, estimators: list[AbstractEstimator], blocks: list[AbstractBlock]) -> BlockMetric:
        program = self.point.program
        leaves, treedef = jax.tree.flatten(program.params)
        operator = Blocks(tuple(blocks), tuple(estimator.place for estimator in estimators), (tuple(leaves), treedef))
        report = make_report(program, self.point.uses, estimators, blocks)
        return BlockMetric(operator, report, jnp.asarray(self.point.total_weight, float))


def is_corrected(estimator: AbstractEstimator) -> bool:
    return isinstance(estimator, KroneckerEstimator) and estimator.is_corrected


def with_basis(estimator: Any, inputs: Factor, outputs: Factor) -> AbstractEstimator:
    """An estimator of corrected eigenvalues in a given basis."""
    return EigenvalueEstimator(estimator.place, estimator.reason, estimator.is_fallback, estimator, inputs, outputs)


def _given(basis: BlockMetric, estimators: Sequence[AbstractEstimator]) -> Sequence[AbstractBlock]:
    """The blocks of a basis whose eigenvalues are to be corrected, if they belong to this model."""
    if not isinstance(basis, BlockMetric):
        raise TypeError(f"{caller()} needs a `basis` from `kfac` or `ekfac`, but got `{type(basis).__name__}`.")
    same = basis.operator.places == tuple(estimator.place for estimator in estimators)
    pairs = zip(estimators, basis.operator.blocks, strict=False)
    leading = [block for estimator, block in pairs if is_corrected(estimator)]
    if not same or not all(isinstance(block, KroneckerBlock | EigenBlock) for block in leading):
        raise ValueError(f"{caller()} got a `basis` of another model, or in other blocks.")
    return leading


def bases(blocks: Sequence[AbstractBlock]) -> list[tuple[Factor, Factor]]:
    """The eigenvectors of the two factors of every block."""

    def basis(block: AbstractBlock) -> tuple[Factor, Factor]:
        if isinstance(block, EigenBlock):
            return block.input_basis, block.output_basis
        inputs, outputs = block.matrices()
        return eigen(inputs).vectors, eigen(outputs).vectors

    return list(map(basis, blocks))
