"""Kronecker-factored metrics with corrected eigenvalues."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
from jaxtyping import PyTree

from natgrad._blocks.base import Assignment
from natgrad._blocks.choose import Rules
from natgrad._blocks.eigen import Corrected
from natgrad._blocks.kronecker import Kronecker
from natgrad._geometry.base import AbstractGeometry
from natgrad._metric.blocks import BlockMetric, by_block
from natgrad._metric.kfac import Request, prepared
from natgrad._operator import batched
from natgrad._operator.base import AbstractBlock
from natgrad._operator.eigen import EigenBlock
from natgrad._operator.factor import Factor
from natgrad._operator.kronecker import KroneckerBlock
from natgrad._types import Key


def ekfac(
    model: Callable,
    geometry: AbstractGeometry,
    params: PyTree,
    x: PyTree = None,
    *,
    basis: BlockMetric | None = None,
    key: Key | None = None,
    num_samples: int = 1,
    sharing: str = "expand",
    bias: str = "joint",
    mask: Any = None,
    strict: bool = False,
    structures: Mapping[str, str] | None = None,
    max_factor: int = 4096,
    oversized: str = "diagonal",
    in_axes: PyTree = 0,
    check: bool = True,
    budget: int = 2**26,
) -> BlockMetric:
    r"""The metric in the eigenvectors of K-FAC, with the exact second moments of gradients in place of products of
    eigenvalues (EKFAC).

    It is never further from the exact blocks than K-FAC with the same eigenvectors and cotangents, in the Frobenius
    norm, and has their trace. Costs K-FAC, one decomposition a factor, and as much again for the second moments.

    **Arguments:**

    - `basis`: a metric from `kfac` or `ekfac` whose eigenvectors to use, such as a running average or that of an
      earlier step; then nothing is decomposed that has been already.
    - Others as for `kfac`.
    """
    rules = Rules(sharing, bias, {} if structures is None else structures, max_factor, oversized=oversized)
    request = Request("`ekfac`", rules, key, num_samples, mask, strict, in_axes, check, budget)
    return request.build(_ekfac, model, geometry, params, x, basis)


@eqx.filter_jit
def _ekfac(model, geometry, params, x, request: Request, masks, basis: BlockMetric | None) -> BlockMetric:
    batch = prepared(model, geometry, params, x, request, masks)
    if basis is None:
        leading: Sequence[AbstractBlock] = batch.blocks(
            [one for one in batch.assignments if isinstance(one, Kronecker)]
        )
    else:
        leading = _given(basis, batch.assignments, request.subject)
    found = iter(bases(leading))
    assignments = [_corrected(one, *next(found)) if isinstance(one, Kronecker) else one for one in batch.assignments]
    return batch.metric(assignments, batch.blocks(assignments))


def _given(basis: BlockMetric, assignments: Sequence[Assignment], subject: str) -> Sequence[AbstractBlock]:
    """The blocks of a basis, if they are those that are wanted."""
    if not isinstance(basis, BlockMetric):
        raise TypeError(f"{subject} needs a `basis` from `kfac` or `ekfac`, but got `{type(basis).__name__}`.")
    same = basis.operator.places == tuple(one.place for one in assignments)
    pairs = zip(assignments, basis.operator.blocks, strict=False)
    leading = [block for one, block in pairs if isinstance(one, Kronecker)]
    if not same or not all(isinstance(block, KroneckerBlock | EigenBlock) for block in leading):
        raise ValueError(f"{subject} got a `basis` of another model, or in other blocks.")
    return leading


def _corrected(assignment: Kronecker, inputs: Factor, outputs: Factor) -> Assignment:
    return Corrected(assignment.place, assignment.reason, assignment.is_fallback, assignment, inputs, outputs)


def bases(blocks: Sequence[AbstractBlock]) -> list[tuple[Factor, Factor]]:
    """The eigenvectors of the two factors of every block."""
    eigen = by_block(blocks, batched.eigen)
    return [
        (block.input_basis, block.output_basis) if isinstance(block, EigenBlock) else (own[0].vectors, own[1].vectors)
        for block, own in zip(blocks, eigen, strict=True)
    ]
