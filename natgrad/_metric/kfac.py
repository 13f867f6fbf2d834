"""Kronecker-factored metrics of a model: K-FAC, and EKFAC with corrected eigenvalues."""

from collections.abc import Callable

from jaxtyping import PyTree

from natgrad._block.rules import BlockRules, check_blocks
from natgrad._check import public
from natgrad._geometry.base import AbstractGeometry
from natgrad._metric.block_metric import BlockMetric
from natgrad._metric.estimated_blocks import Request
from natgrad._point.evaluate import locate
from natgrad._point.point import Point
from natgrad._types import Key


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

    $\frac1N\sum_i J_i^\top G_z(z_i) J_i \approx A \otimes G$ for every weight, where $A$ is the second moment of the
    weight's inputs and $G$ the second moment of the cotangents of its outputs.

    Weights are found by what the program does with them, whatever library wrote it, and every use is counted.
    Parameters that scale and shift units get a block of two for every unit, other small ones a dense block, both exact.
    The rest is diagonal, and `report()` says so and why.

    **Arguments:**

    - `key`: with a key, cotangents are `num_samples` draws of `geometry.sample` for every example; without, backward
      passes are exact, one for each column of `geometry.factor`.
    - `blocks`: what blocks are made of, `BlockRules(...)`.
    - `x`: inputs, or a `Batch` with weights or masks of positions. With a mask, exact blocks leave out the outputs that
      do not count.
    - `has_aux`: whether the model returns `(z, aux)`; `aux` is then left out.
    - `model` may be a `Point`, from `evaluate`, in place of `model`, `geometry`, `params` and `x`.

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
    place = locate(model, geometry, params, x, has_aux=has_aux)
    return Request(False, check_blocks(blocks), key, num_samples).build(place)


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
    r"""The metric in the eigenvectors of K-FAC, with exact second moments of gradients for eigenvalues (EKFAC).

    It is never further from the exact blocks than K-FAC with the same eigenvectors and cotangents, in the Frobenius
    norm, and has their trace. Costs K-FAC, one decomposition a factor, and as much again for the second moments.

    **Arguments:**

    - `basis`: a metric from `kfac` or `ekfac` whose eigenvectors to use, such as a running average or that of an
      earlier step; then nothing is decomposed that has been already.
    - Others as for `kfac`.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0, 0.0], [0.0, 2.0]])
    arguments = lambda w, x: jnp.tanh(x @ w), ng.Euclidean(), jnp.ones((2, 1)), x
    assert jnp.allclose(ng.ekfac(*arguments).trace(), ng.pullback(*arguments).trace())
    ```
    """
    place = locate(model, geometry, params, x, has_aux=has_aux)
    return Request(True, check_blocks(blocks), key, num_samples).build(place, basis)
