import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PyTree

from natgrad import _linalg, _tree
from natgrad._check import public
from natgrad._metric.base import AbstractMetric
from natgrad._types import Scalar


class Rank(eqx.Module):
    """The rank of a metric at a point, and what it was read from."""

    rank: Int[Array, ""]
    nullity: Int[Array, ""]
    spectrum: Float[Array, " eigenvalues"]
    cutoff: Scalar


@public
def rank(metric: AbstractMetric, *, rtol: float | None = None) -> Rank:
    r"""How many independent directions of the parameters move the outputs, and how many (the nullity) move none.

    Counts the eigenvalues above `rtol` times the largest (by default the size times machine epsilon). Taken from the
    Gram matrix in sample space where that is smaller. A rank below the one found at most other parameters reveals a
    non-proper point. A self-intersection of the model, where several parameters give the same outputs with
    different tangents, cannot be seen from one of them."""
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
    """An orthonormal basis of the directions that the metric gives no length, along a new leading axis of trees like
    the parameters (dense: for few parameters)."""
    values, vectors = _linalg.eigh(metric.as_matrix())
    relative = values.size * jnp.finfo(values.dtype).eps if rtol is None else rtol
    none = jnp.abs(values) <= relative * jnp.max(jnp.abs(values), initial=0.0)
    _, unflatten = _tree.flatten(metric._zeros())
    return eqx.filter_vmap(unflatten)(vectors.T[none])
