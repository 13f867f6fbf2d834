import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad._metric.base import AbstractMetric, row_chunk


def root_gram(metric: AbstractMetric) -> Float[Array, "rows rows"]:
    r"""$R R^\top$ for the root of a metric, a few rows at a time: grows with the samples, never with the square
    of the parameters."""
    size = metric.root_size
    if size is None:
        raise TypeError(
            f"`{type(metric).__name__}` has no sample space: it is not a sum over samples. Use `CG` or `Cholesky`."
        )

    def row(index):
        basis = jnp.zeros(size, metric._dtype).at[index].set(1.0)
        return metric.root_mv(metric.root_transpose_mv(basis))

    return jax.lax.map(row, jnp.arange(size), batch_size=row_chunk(metric))
