"""Kronecker-factored metrics of a model: K-FAC, and EKFAC with corrected eigenvalues."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import PyTree

from natgrad._block.choose import BlockRules
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
    sharing: str = "expand",
    bias: str = "joint",
    mask: Any = None,
    strict: bool = False,
    structures: Mapping[str, str] | None = None,
    max_factor: int = 4096,
    oversized: str = "diagonal",
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
    - `sharing`: what to do with the positions of one example that share a weight. `"expand"` takes each for an example
      of its own, right where each has its own term in the loss. `"reduce"` averages inputs and sums cotangents over
      them first, right where they are pooled.
    - `bias`: `"joint"` gives a weight and its bias one block, `"separate"` one each.
    - `mask`: zeros at positions that do not count (padding), an array of examples by positions, for the weights that
      are used at as many positions and for outputs that have them. A mapping gives weights masks of their own, by path,
      and `"z"` that of the outputs. Exact blocks are those of the outputs that count.
    - `strict`: whether to refuse a model in which some parameter would get less than its structure, instead of warning.
    - `structures`: `"kronecker"`, `"eigenvalue-corrected"` (see `ekfac`), `"dense"` or `"diagonal"` for the parameters
      at or below a path.
    - `max_factor`: the largest factor to store. Above it that side of the product is diagonal, or with
      `oversized="blocked"` it is made of blocks that are no larger.
    - `in_axes`, `has_aux`, `check`, `budget`: as for `per_example`.
    """
    chosen = {} if structures is None else structures
    rules = BlockRules("kronecker", sharing, bias, chosen, max_factor, oversized=oversized)
    request = Request(rules, num_samples, strict, in_axes, has_aux, check, budget)
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
    sharing: str = "expand",
    bias: str = "joint",
    mask: Any = None,
    strict: bool = False,
    structures: Mapping[str, str] | None = None,
    max_factor: int = 4096,
    oversized: str = "diagonal",
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
    chosen = {} if structures is None else structures
    rules = BlockRules("eigenvalue-corrected", sharing, bias, chosen, max_factor, oversized=oversized)
    request = Request(rules, num_samples, strict, in_axes, has_aux, check, budget)
    return request.build(model, geometry, params, x, key, mask, basis)
