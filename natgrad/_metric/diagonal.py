"""Diagonal metrics: the identity, and the diagonal of a pulled-back metric, from squares of gradients that are never
formed."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from natgrad import _tree
from natgrad._check import Requirement, caller, public, require
from natgrad._compile import compiled
from natgrad._geometry.base import AbstractGeometry
from natgrad._metric.base import AbstractMetric
from natgrad._model import finite
from natgrad._point.batch import refuse_mask
from natgrad._point.evaluate import AnyPoint, as_point, check_outputs_in, evaluated, geometry_of
from natgrad._point.point import Point, check_num_samples
from natgrad._types import Key, Output


class DiagonalMetric(AbstractMetric):
    r"""A metric of which only the diagonal is kept, $G \approx \operatorname{diag}(d)$.

    `standard_error`, where it was asked for, is that of each entry of $d$ as an estimate of the exact diagonal; zero
    where backward passes were exact. Solving with it costs one division an entry.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    metric = ng.DiagonalMetric({"w": jnp.array([1.0, 4.0])})
    solution = ng.solve(metric, {"w": jnp.ones(2)})
    assert jnp.allclose(solution.value["w"], jnp.array([1.0, 0.25]))
    ```
    """

    entries: PyTree
    standard_error: PyTree = None
    # Or their total weight.
    num_examples: Any = 1.0

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
    model: Callable | Point,
    geometry: AbstractGeometry | None = None,
    params: PyTree = None,
    x: PyTree = None,
    *,
    key: Key | None = None,
    num_samples: int = 1,
    standard_error: bool = False,
    has_aux: bool = False,
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
    - `has_aux`: whether the model returns `(z, aux)`; `aux` is then left out.
    - `model` may be a `Point`, from `evaluate`, in place of `model`, `geometry`, `params` and `x`.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0, 0.0], [0.0, 2.0]])
    metric = ng.diagonal(lambda w, x: x @ w, ng.Euclidean(), jnp.zeros(2), x)
    assert jnp.allclose(metric.diagonal(), jnp.array([0.5, 2.0]))
    ```
    """
    check_num_samples(num_samples)
    at = as_point(model, geometry, params, x, has_aux=has_aux)
    refuse_mask(at.map.batch)
    geometry = geometry_of(at)
    metric, z = _exact(at) if key is None else _sampled(at, key, num_samples, standard_error)
    check_outputs_in(geometry, z, at.map.batch)
    require(metric.entries, [finite(metric.entries)], f"{caller()}: every square", traced=False)
    if key is None and standard_error:
        return DiagonalMetric(metric.entries, jax.tree.map(jnp.zeros_like, metric.entries), metric.num_examples)
    return metric


@compiled
def _exact(at: AnyPoint) -> tuple[DiagonalMetric, Output]:
    point = evaluated(at)
    entries = _tree.scale(1 / point.num_examples, point.power_sum(point.refuse_coupled(point.columns())))
    return DiagonalMetric(entries, None, point.total_weight), point.z


@compiled
def _sampled(at: AnyPoint, key: Key, num_samples: int, standard_error: bool) -> tuple[DiagonalMetric, Output]:
    point = evaluated(at)
    count, total = point.num_examples, point.num_examples * num_samples
    if standard_error and total < 2:
        raise ValueError(
            f"{caller()} needs two pseudo-gradients for a standard error, but got one. Raise `num_samples`."
        )
    # Columns are draws over the root of their number.
    columns = point.refuse_coupled(point.columns(key, num_samples))
    entries = _tree.scale(1 / count, point.power_sum(columns))
    if not standard_error:
        return DiagonalMetric(entries, None, point.total_weight), point.z
    fourth = _tree.scale(num_samples / count, point.power_sum(columns, power=4))
    variance = jax.tree.map(lambda d, d4: jnp.maximum(d4 - d**2, 0.0) / (total - 1), entries, fourth)
    return DiagonalMetric(entries, jax.tree.map(jnp.sqrt, variance), point.total_weight), point.z


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
    """The Euclidean metric on parameters like `params`.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    assert jnp.allclose(ng.identity({"w": jnp.zeros(2)}).as_matrix(), jnp.eye(2))
    ```
    """
    leaves, treedef = jax.tree.flatten(_tree.structure(params))
    return IdentityMetric((tuple(leaves), treedef))
