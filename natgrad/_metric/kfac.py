"""Kronecker-factored metrics of a model: K-FAC, and EKFAC with corrected eigenvalues."""

from collections.abc import Callable
from typing import Any

from jaxtyping import PyTree

from natgrad._block.rules import BlockRules, check_blocks
from natgrad._check import public
from natgrad._geometry.base import AbstractGeometry
from natgrad._metric.block_metric import BlockMetric
from natgrad._metric.estimated_blocks import Request
from natgrad._types import Key


@public
def kfac(
    model: Callable,
    geometry: AbstractGeometry,
    params: PyTree,
    x: PyTree = None,
    *,
    key: Key | None = None,
    num_samples: int = 1,
    blocks: BlockRules | None = None,
    mask: Any = None,
    in_axes: PyTree = 0,
    has_aux: bool = False,
    check: bool = True,
    budget: int = 2**26,
) -> BlockMetric:
    r"""The metric $\frac1N\sum_i J_i^\top G_z(z_i) J_i$ of `model(params, x)`, approximated by one Kronecker product
    $A \otimes G$ for every weight and its bias (K-FAC): $A$ is the second moment of the weight's inputs, $G$ that of
    the cotangents of its outputs.

    Weights are found by what the program does with them, whatever library wrote it, and every use is counted.
    Parameters that scale and shift units get a block of two for every unit, other small ones a dense block, both exact.
    The rest is diagonal, and `report()` says so and why.

    **Arguments:**

    - `key`: with a key, cotangents are `num_samples` draws of `geometry.sample` for every example; without, backward
      passes are exact, one for each column of `geometry.factor`.
    - `blocks`: what blocks are made of, `BlockRules(...)`.
    - `mask`: zeros at positions that do not count (padding), an array of examples by positions, for the weights that
      are used at as many positions and for outputs that have them. A mapping gives weights masks of their own, by path,
      and `"z"` that of the outputs. Exact blocks are those of the outputs that count.
    - `in_axes`, `has_aux`, `check`, `budget`: as for `per_example`.
    """
    request = Request(False, check_blocks(blocks), num_samples, in_axes, has_aux, check, budget)
    return request.build(model, geometry, params, x, key, mask)


@public
def ekfac(
    model: Callable,
    geometry: AbstractGeometry,
    params: PyTree,
    x: PyTree = None,
    *,
    basis: BlockMetric | None = None,
    key: Key | None = None,
    num_samples: int = 1,
    blocks: BlockRules | None = None,
    mask: Any = None,
    in_axes: PyTree = 0,
    has_aux: bool = False,
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
    request = Request(True, check_blocks(blocks), num_samples, in_axes, has_aux, check, budget)
    return request.build(model, geometry, params, x, key, mask, basis)
