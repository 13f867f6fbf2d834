from collections.abc import Callable, Mapping
from typing import Any

from jaxtyping import PyTree

from natgrad._blocks.choose import Rules
from natgrad._check import public
from natgrad._geometry.base import AbstractGeometry
from natgrad._metric.blocks import BlockMetric
from natgrad._metric.factored import Request
from natgrad._types import Key


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
    rules = Rules("eigenvalue-corrected", sharing, bias, chosen, max_factor, oversized=oversized)
    request = Request(rules, num_samples, strict, in_axes, has_aux, check, budget)
    return request.build(model, geometry, params, x, key, mask, basis)
