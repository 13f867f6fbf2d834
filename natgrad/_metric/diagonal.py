"""Diagonal metrics: the identity, and the diagonal of a pulled-back metric, from squares of gradients that are never
formed."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from natgrad import _tree
from natgrad._check import Requirement, caller, public, require
from natgrad._geometry.base import AbstractGeometry
from natgrad._metric.base import AbstractMetric
from natgrad._metric.samples import forward_in, power_sum
from natgrad._model import check_params, finite, num_examples, without_aux
from natgrad._point.columns import check_num_samples, factor_columns, sample_columns
from natgrad._point.probe import check_model
from natgrad._types import Key


class DiagonalMetric(AbstractMetric):
    r"""A metric of which only the diagonal is kept, $G \approx \operatorname{diag}(d)$.

    `standard_error`, where it was asked for, is that of each entry of $d$ as an estimate of the exact diagonal; zero
    where backward passes were exact. Solving with it costs one division an entry."""

    entries: PyTree
    standard_error: PyTree = None
    num_examples: int = eqx.field(default=1, static=True)

    def _mv(self, v):
        return jax.tree.map(lambda d, v: (d * v.astype(d.dtype)).astype(v.dtype), self.entries, v)

    def __check_init__(self):
        allowed = [
            Requirement(jnp.all(leaf >= 0), "entries of at least 0", "A metric measures lengths.")
            for leaf in jax.tree.leaves(self.entries)
            if isinstance(leaf, jax.Array | np.ndarray)
        ]
        require(self.entries, allowed, "`DiagonalMetric`", traced=False)

    def as_matrix(self):
        return jnp.diag(_tree.flatten(self.entries)[0])

    def diagonal(self):
        return self.entries

    @property
    def is_diagonal(self):
        return True

    @property
    def root_size(self):
        return self.in_size()

    def root_mv(self, v):
        return self._roots() * _tree.flatten(v)[0]

    def root_transpose_mv(self, u):
        return self._unflatten(self._roots() * u)

    def in_structure(self):
        return _tree.structure(self.entries)

    def _roots(self) -> Array:
        return jnp.sqrt(_tree.flatten(self.entries)[0])


@public
def diagonal(
    model: Callable,
    geometry: AbstractGeometry,
    params: PyTree,
    x: PyTree = None,
    *,
    key: Key | None = None,
    num_samples: int = 1,
    standard_error: bool = False,
    in_axes: PyTree = 0,
    has_aux: bool = False,
    check: bool = True,
    budget: int = 2**26,
) -> DiagonalMetric:
    r"""The diagonal of the metric $\frac1N\sum_i J_i^\top G_z(z_i) J_i$ of `model(params, x)`.

    With a `key` it is estimated from `num_samples` pseudo-gradients an example, $J_i^\top s$ with $s$ drawn by
    `geometry.sample`, for about the cost and the memory of one gradient each. Without, backward passes are exact: one
    for each column of `geometry.factor`, which is as many as the output has dimensions. It is compiled for the model
    and its shapes when it is first called.

    **Arguments:**

    - `standard_error`: whether to add the standard error of each entry, from fourth powers of the
      pseudo-gradients. It counts the spread between examples as if they had been drawn at random too, so that it is
      rather too large for the diagonal of these very examples.
    - `in_axes`, `has_aux`, `check`, `budget`: as for `per_example`.
    """
    check_num_samples(num_samples)
    if key is not None and standard_error and num_samples * num_examples(x, in_axes) < 2:
        raise ValueError(
            f"{caller()} needs two pseudo-gradients for a standard error, but got one. Raise `num_samples`."
        )
    check_params(params)
    model = without_aux(model, has_aux)
    is_left = check and check_model(model, params, x, in_axes)
    estimate = _estimated if key is not None else _exact
    sampling = (key, num_samples) if key is not None else ()
    model = _tree.as_callable(model)
    metric = estimate(model, geometry, params, x, standard_error, in_axes, budget, is_left, *sampling)
    require(metric.entries, [finite(metric.entries)], f"{caller()}: every square", traced=False)
    return metric


@eqx.filter_jit
def _exact(model, geometry, params, x, standard_error, in_axes, budget, check) -> DiagonalMetric:
    forward = forward_in(geometry, model, params, x, in_axes, budget, check)
    count = forward.program.num_examples
    entries = _tree.scale(1 / count, power_sum(forward, factor_columns(geometry, forward.z)))
    return DiagonalMetric(entries, jax.tree.map(jnp.zeros_like, entries) if standard_error else None, count)


@eqx.filter_jit
def _estimated(model, geometry, params, x, standard_error, in_axes, budget, check, key, num_samples) -> DiagonalMetric:
    forward = forward_in(geometry, model, params, x, in_axes, budget, check)
    count = forward.program.num_examples
    total = count * num_samples
    draws = sample_columns(geometry, forward.z, key, num_samples)
    entries = _tree.scale(1 / total, power_sum(forward, draws))
    if not standard_error:
        return DiagonalMetric(entries, None, count)
    fourth = _tree.scale(1 / total, power_sum(forward, draws, power=4))
    variance = jax.tree.map(lambda d, d4: jnp.maximum(d4 - d**2, 0.0) / (total - 1), entries, fourth)
    return DiagonalMetric(entries, jax.tree.map(jnp.sqrt, variance), count)


class IdentityMetric(AbstractMetric):
    """The Euclidean metric on the parameters themselves. `metric + 0.1 * identity(params)` is a damped metric."""

    _structure: tuple = eqx.field(static=True)

    def _mv(self, v):
        return v

    @property
    def root_size(self):
        return self.in_size()

    def root_mv(self, v):
        return _tree.flatten(v)[0]

    def root_transpose_mv(self, u):
        return self._unflatten(u)

    def diagonal(self):
        return jax.tree.map(jnp.ones_like, self._zeros())

    @property
    def is_diagonal(self):
        return True

    def in_structure(self):
        leaves, treedef = self._structure
        return jax.tree.unflatten(treedef, leaves)


@public
def identity(params: PyTree) -> IdentityMetric:
    """The Euclidean metric on parameters like `params`."""
    leaves, treedef = jax.tree.flatten(_tree.structure(params))
    return IdentityMetric((tuple(leaves), treedef))
