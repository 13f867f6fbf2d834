"""Statistics of the rows of a root, $s_{ic}^\\top J_i$ for the columns $s_{ic}$ of the outputs' metrics, by the rules
for single examples.

Compiled here, and once for a model and its shapes, since metrics are mostly built and used outside `jit`."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from natgrad import _tree
from natgrad._metric.output import ColumnsOutputMetric
from natgrad._per_example.forward import forward_pass
from natgrad._per_example.operator import PerExample

# The model, its parameters and its data.
Source = tuple[Callable, PyTree, PyTree]


@eqx.filter_jit
def gram(source: Source, columns: ColumnsOutputMetric) -> Float[Array, "rows rows"]:
    kernel = _rows(source, columns).gram().transpose(1, 0, 3, 2)
    if columns.is_centred:
        kernel = kernel - jnp.mean(kernel, axis=0, keepdims=True)
        kernel = kernel - jnp.mean(kernel, axis=2, keepdims=True)
    return kernel.reshape(columns.root_size, columns.root_size)


@eqx.filter_jit
def rows(source: Source, columns: ColumnsOutputMetric) -> Float[Array, "rows P"]:
    trees = _rows(source, columns).rows()
    flat = jax.vmap(jax.vmap(lambda tree: _tree.flatten(tree)[0]))(trees).swapaxes(0, 1)
    if columns.is_centred:
        flat = flat - jnp.mean(flat, axis=0, keepdims=True)
    return flat.reshape(columns.root_size, -1)


@eqx.filter_jit
def squared_sum(source: Source, columns: ColumnsOutputMetric) -> PyTree:
    per_row = _rows(source, columns)
    squares = per_row.squared_sum()
    if not columns.is_centred:
        return squares
    # Centred sums of squares: those about zero, less the square of the mean of each column.
    count, num_columns = columns._shape
    means = [per_row.rmatvec(jnp.zeros((num_columns, count)).at[c].set(1.0)) for c in range(num_columns)]
    less = lambda total, *sums: total - sum(s.astype(total.dtype) ** 2 for s in sums) / count
    return jax.tree.map(less, squares, *means)


def _rows(source: Source, columns: ColumnsOutputMetric) -> PerExample:
    """The rows, with an axis of columns in front of that of examples."""
    model, params, x = source
    forward = forward_pass(model, params, x, in_axes=0, check=False, budget=2**26, subject="A metric")
    stacked: Any = jax.tree.map(lambda s: s.swapaxes(0, 1), columns.columns)
    return forward.pull(stacked, is_stacked=True)
