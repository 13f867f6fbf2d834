"""Statistics of the rows of a root, $s_{ic}^\\top J_i$ for the columns $s_{ic}$ of the outputs' metrics, by the rules
for single examples.

Compiled here, and once for a model and its shapes, since metrics are mostly built and used outside `jit`."""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from natgrad import _tree
from natgrad._check import caller
from natgrad._geometry.base import AbstractGeometry
from natgrad._metric.output import ColumnsOutputMetric
from natgrad._point.forward import Forward, forward_pass
from natgrad._point.per_example import PerExample
from natgrad._point.records import summed
from natgrad._types import Output

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
    forward = _forward(source)
    squares = power_sum(forward, _stacked(columns))
    if not columns.is_centred:
        return squares
    # Centred sums of squares: those about zero, less the squares of the columns' means.
    count, num_columns = columns._shape
    rows = forward.pull(_stacked(columns), is_stacked=True)
    sums = [rows.rmatvec(jnp.zeros((num_columns, count)).at[c].set(1.0)) for c in range(num_columns)]
    less = lambda total, *sums: total - sum(s.astype(total.dtype) ** 2 for s in sums) / count
    return jax.tree.map(less, squares, *sums)


def _rows(source: Source, columns: ColumnsOutputMetric) -> PerExample:
    return _forward(source).pull(_stacked(columns), is_stacked=True)


def _forward(source: Source) -> Forward:
    model, params, x = source
    return forward_pass(model, params, x, in_axes=0, budget=2**26)


def _stacked(columns: ColumnsOutputMetric) -> Output:
    """Columns with their axis in front of that of the examples."""
    return jax.tree.map(lambda s: s.swapaxes(0, 1), columns.columns)


def power_sum(forward: Forward, columns: Output, power: int = 2) -> PyTree:
    """Sums of powers over examples and columns, as many columns at a time as the budget allows."""

    def sums(part: Output) -> PyTree:
        # One column at a time keeps what rematerialisation saves.
        is_single = jax.tree.leaves(part)[0].shape[0] == 1
        part = jax.tree.map(lambda s: s[0], part) if is_single else part
        return forward.pull(part, is_stacked=not is_single).power_sum(power)

    count = jax.tree.leaves(columns)[0].shape[0]
    return summed(sums, columns, forward.budget.chunk(count, bytes_of_column(forward)))


def forward_in(
    geometry: AbstractGeometry,
    model: Callable,
    params: PyTree,
    x: PyTree,
    in_axes: PyTree,
    budget: int,
    check: bool,
) -> Forward:
    """A forward pass whose outputs suit a geometry."""
    forward = forward_pass(model, params, x, in_axes=in_axes, budget=budget, check=check)
    geometry._check(_tree.at_least_float32(jax.tree.map(lambda leaf: leaf[0], forward.z)), caller())
    return forward


def bytes_of_column(forward: Forward) -> int:
    """What one more cotangent an example adds to memory: those of every site."""
    program = forward.program
    steps = lambda site: program.num_examples * math.prod(program.lengths[loop] for loop in site.loops)
    return sum(steps(site) * math.prod(a.shape) * a.dtype.itemsize for site in program.sites for a in site.avals)
