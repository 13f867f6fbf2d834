"""Statistics of the rows of a root, $s_{ic}^\\top J_i$ for the columns $s_{ic}$ of the outputs' metrics, by the rules
for single examples.

Compiled here, and once for a model and its shapes, since metrics are mostly built and used outside `jit`."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from natgrad import _tree
from natgrad._compile import compiled
from natgrad._metric.output import ColumnsOutputMetric
from natgrad._point.evaluate import AnyPoint, evaluated
from natgrad._point.per_example import PerExample


@compiled
def gram(at: AnyPoint, columns: ColumnsOutputMetric) -> Float[Array, "rows rows"]:
    kernel = _rows(at, columns).gram()
    if columns.is_centred:
        kernel = kernel - jnp.mean(kernel, axis=1, keepdims=True)
        kernel = kernel - jnp.mean(kernel, axis=3, keepdims=True)
    size = math.prod(columns.shape)
    return kernel.reshape(size, size)


@compiled
def rows(at: AnyPoint, columns: ColumnsOutputMetric) -> Float[Array, "rows P"]:
    flat = jax.vmap(jax.vmap(lambda tree: _tree.flatten(tree)[0]))(_rows(at, columns).rows())
    if columns.is_centred:
        flat = flat - jnp.mean(flat, axis=1, keepdims=True)
    return flat.reshape(math.prod(columns.shape), -1)


@compiled
def squared_sum(at: AnyPoint, columns: ColumnsOutputMetric) -> PyTree:
    point = evaluated(at)
    squares = point.power_sum(columns.columns)
    if not columns.is_centred:
        return squares
    # Centred sums of squares: the sums of squares, less the squares of the sums of every column.
    num_columns, count = columns.shape
    rows = point.per_example(columns.columns, is_stacked=True)
    sums = [rows.rmatvec(jnp.zeros((num_columns, count)).at[c].set(1.0)) for c in range(num_columns)]
    less = lambda total, *sums: total - sum(s.astype(total.dtype) ** 2 for s in sums) / count
    return jax.tree.map(less, squares, *sums)


def _rows(at: AnyPoint, columns: ColumnsOutputMetric) -> PerExample:
    return evaluated(at).per_example(columns.columns, is_stacked=True)
