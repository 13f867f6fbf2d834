"""Rank and null space of a metric: how many directions of the parameters change the outputs, and which do not."""

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from natgrad import _linalg, _tree
from natgrad._check import public
from natgrad._metric.base import AbstractMetric
from natgrad._types import Scalar


class Rank(eqx.Module):
    """The rank and nullity of a metric, its eigenvalues from the largest to the smallest, and the cutoff below which
    they count as zero."""

    rank: Int[Array, ""]
    nullity: Int[Array, ""]
    spectrum: Float[Array, " eigenvalues"]
    cutoff: Scalar


@public
def rank(metric: AbstractMetric, *, rtol: float | None = None) -> Rank:
    r"""How many independent directions of the parameters change the outputs, and how many (the nullity) do not.

    Counts the eigenvalues above `rtol` times the largest; by default `rtol` is the number of parameters times machine
    epsilon. Uses the Gram matrix in sample space where that is smaller than the metric. A rank below the rank at most
    other parameters reveals a singularity of the model. A crossing of the model with itself, where several parameters
    give the same outputs with different tangents, does not change the rank.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    metric = ng.pullback(lambda w: w[:1] + w[1:], ng.Euclidean(), jnp.ones(2))
    ng.rank(metric).nullity  # 1: the difference of the two parameters
    ```
    """
    size = metric.in_size()
    if metric.root_size is not None and metric.root_size < size:
        matrix = metric.root_gram()
    else:
        matrix = metric.as_matrix()
    spectrum = _linalg.eigvalsh((matrix + matrix.T) / 2)[::-1]
    relative = size * jnp.finfo(spectrum.dtype).eps if rtol is None else rtol
    cutoff = relative * jnp.max(jnp.abs(spectrum), initial=0.0)
    count = jnp.sum(jnp.abs(spectrum) > cutoff)
    return Rank(count, size - count, spectrum, jnp.asarray(cutoff, spectrum.dtype))


@public
def null_space(metric: AbstractMetric, *, rtol: float | None = None) -> PyTree:
    """An orthonormal basis of the directions in which the metric is zero.

    The directions are along a new leading axis of a tree like the parameters. Forms the dense matrix: for few
    parameters.

    `rtol` is the cutoff as in `rank`.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    # A product of two weights does not change if one grows as the other shrinks.
    metric = ng.pullback(lambda w: w[0] * w[1], ng.Euclidean(), jnp.array([1.0, 1.0]))
    (direction,) = ng.null_space(metric)
    assert jnp.allclose(direction[0], -direction[1], atol=1e-6)
    ```
    """
    values, vectors = _linalg.eigh(metric.as_matrix())
    relative = values.size * jnp.finfo(values.dtype).eps if rtol is None else rtol
    is_zero = jnp.abs(values) <= relative * jnp.max(jnp.abs(values), initial=0.0)
    _, unflatten = _tree.flatten(metric._zeros())
    return eqx.filter_vmap(unflatten)(vectors.T[is_zero])
