"""Kronecker-factored metrics of a model: K-FAC, and EKFAC with corrected eigenvalues."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from natgrad._block.base import AbstractBlock
from natgrad._block.eigen import EigenBlock
from natgrad._block.kronecker import KroneckerBlock
from natgrad._block.masks import check_mask
from natgrad._block.rules import BlockRules, check_blocks
from natgrad._block.structure_report import check_fallbacks
from natgrad._check import caller, is_concrete, public
from natgrad._compile import compiled
from natgrad._geometry.base import AbstractGeometry
from natgrad._metric.block_metric import BlockMetric
from natgrad._metric.estimated_blocks import Bases, BlockEstimate, awaits_basis, eigenvectors, estimate, joined
from natgrad._model import finite
from natgrad._point.evaluate import AnyPoint, as_point, check_outputs_in, evaluated, geometry_of
from natgrad._point.point import Point, check_num_samples
from natgrad._types import Key, Output


@public
def kfac(
    model: Callable | Point,
    geometry: AbstractGeometry | None = None,
    params: PyTree = None,
    x: PyTree = None,
    *,
    key: Key | None = None,
    num_samples: int = 1,
    blocks: BlockRules | None = None,
    has_aux: bool = False,
) -> BlockMetric:
    r"""The metric of `model(params, x)`, approximated by one Kronecker product for every weight and its bias (K-FAC).

    $\frac1N\sum_i J_i^\top G_z(z_i) J_i \approx A \otimes B$ for every weight, where $A$ is the second moment of the
    weight's inputs and $B$ the second moment of the cotangents of its outputs.

    Weights are found by what the program does with them, whatever library wrote it, and every use is counted.
    Scales and shifts get a block of two for every neuron or channel, other small parameters a dense block, both exact.
    The rest is diagonal, and `report()` says so and why.

    **Arguments:**

    - `model`, `geometry`, `params`: as for `pullback`. `model` may be a `Point`, from `evaluate`, in place of `model`,
      `geometry`, `params` and `x`.
    - `x`: inputs, or a `Batch` with weights or masks of positions. Masked positions of outputs are left out.
    - `key`: with a key, cotangents are `num_samples` draws of `geometry.sample` for every example; without, backward
      passes are exact, one for each column of `geometry.factor`.
    - `blocks`: options for the structure of the blocks, default `BlockRules()`.
    - `has_aux`: whether the model returns `(z, aux)`; `aux` is then left out.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0, 0.0], [0.0, 2.0]])
    arguments = lambda w, x: x @ w, ng.Euclidean(), jnp.zeros((2, 1)), x
    metric = ng.kfac(*arguments)
    # Exact for a linear layer with least squares.
    assert jnp.allclose(metric.as_matrix(), ng.pullback(*arguments).as_matrix())
    ```
    """
    at = as_point(model, geometry, params, x, has_aux=has_aux)
    _check_point(at, num_samples)
    rules = check_blocks(blocks)
    metric, z = _computed(at, key, num_samples, rules, False)
    return _checked(metric, z, at, rules)


@public
def ekfac(
    model: Callable | Point,
    geometry: AbstractGeometry | None = None,
    params: PyTree = None,
    x: PyTree = None,
    *,
    basis: BlockMetric | None = None,
    key: Key | None = None,
    num_samples: int = 1,
    blocks: BlockRules | None = None,
    has_aux: bool = False,
) -> BlockMetric:
    r"""The metric in the eigenvectors of K-FAC, with second moments of gradients for eigenvalues (EKFAC).

    In the Frobenius norm it is at least as close to the exact blocks as K-FAC with the same eigenvectors and
    cotangents, and its trace is the trace of the exact blocks. Costs K-FAC, one decomposition a factor, and as much
    again for the second moments.

    **Arguments:**

    - `basis`: a metric from `kfac` or `ekfac` whose eigenvectors to use, such as a running average or the metric
      of an earlier step. If it comes from `ekfac`, nothing is decomposed.
    - Others as for `kfac`.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0, 0.0], [0.0, 2.0]])
    arguments = lambda w, x: jnp.tanh(x @ w), ng.Euclidean(), jnp.ones((2, 1)), x
    assert jnp.allclose(ng.ekfac(*arguments).trace(), ng.pullback(*arguments).trace())
    ```
    """
    at = as_point(model, geometry, params, x, has_aux=has_aux)
    _check_point(at, num_samples)
    rules = check_blocks(blocks)
    metric, z = _computed(at, key, num_samples, rules, True, basis)
    return _checked(metric, z, at, rules)


@compiled
def _computed(
    at: AnyPoint,
    key: Key | None,
    num_samples: int,
    rules: BlockRules,
    is_corrected: bool,
    basis: BlockMetric | None = None,
) -> tuple[BlockMetric, Output]:
    point = evaluated(at)
    columns = point.refuse_coupled(point.columns(key, num_samples))
    at_point = estimate(point, columns, rules, is_corrected=is_corrected)
    # Also without `is_corrected`, for parameters whose structure the rules state.
    if any(map(awaits_basis, at_point.estimators)):
        at_point = at_point.with_bases(at_point.bases() if basis is None else _bases_of(basis, at_point))
    return joined([at_point]), point.z


def _bases_of(basis: BlockMetric, at_point: BlockEstimate) -> Bases:
    """The eigenvectors of a metric that was given, if it belongs to this model."""
    if not isinstance(basis, BlockMetric):
        raise TypeError(f"{caller()} needs a `basis` from `kfac` or `ekfac`, but got `{type(basis).__name__}`.")
    is_same = basis.operator.places == tuple(estimator.place for estimator in at_point.estimators)
    pairs = zip(at_point.estimators, basis.operator.blocks, strict=False)
    blocks = {estimator.place: block for estimator, block in pairs if awaits_basis(estimator)}
    if not is_same or not all(isinstance(block, KroneckerBlock | EigenBlock) for block in blocks.values()):
        raise ValueError(f"{caller()} got a `basis` of another model, or in other blocks.")
    return eigenvectors(blocks)


def _check_point(at: AnyPoint, num_samples: int) -> None:
    check_num_samples(num_samples)
    geometry_of(at)
    check_mask(at.map.batch)


def _checked(metric: BlockMetric, z: Output, at: AnyPoint, rules: BlockRules) -> BlockMetric:
    """Raise if outputs are outside the domain or factors are not finite, and warn of fallbacks."""
    check_outputs_in(geometry_of(at), z, at.map.batch)
    check_fallbacks(metric.report(), rules)
    _require_finite(metric)
    return metric


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
