"""Metrics on the outputs of a batch: the middle factor of a pulled-back metric."""

from abc import abstractmethod
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from natgrad import _linalg, _tree
from natgrad._geometry.base import AbstractGeometry
from natgrad._geometry.bregman import Bregman
from natgrad._types import Key, Output


class AbstractOutputMetric(eqx.Module):
    r"""A positive semidefinite operator $M = S S^\top$ on the outputs of a batch, usually one block an example."""

    @abstractmethod
    def mv(self, u: Output) -> Output: ...

    @abstractmethod
    def root_mv(self, u: Output) -> Float[Array, " rows"]:
        r"""$S^\top u$."""

    @abstractmethod
    def root_transpose_mv(self, c: Float[Array, " rows"]) -> Output:
        r"""$S c$."""

    @abstractmethod
    def sample(self, key: Key) -> Output:
        r"""Cotangents with mean zero and covariance $M$."""

    @property
    @abstractmethod
    def root_size(self) -> int: ...

    def as_columns(self) -> "ColumnsOutputMetric | None":
        """The metric as given columns for each example; `None` where its rows mix examples."""
        return None

    @abstractmethod
    def coordinates(self, cotangents: Output) -> Float[Array, " rows"]:
        r"""$c$ of least norm with $S c$ closest to the given cotangents."""


class SameGeometry(eqx.Module):
    """Every example has the same geometry."""

    geometry: AbstractGeometry

    def __call__(self, target: PyTree) -> AbstractGeometry:
        del target
        return self.geometry


class LossGeometry(eqx.Module):
    """Each example has the geometry of its own loss, as a function of the output."""

    loss: Callable = eqx.field(converter=_tree.as_callable)

    def __call__(self, target: PyTree) -> AbstractGeometry:
        return Bregman(lambda z: self.loss(z, target))


class ExactOutputMetric(AbstractOutputMetric):
    """The metric of a geometry at each output."""

    geometry_of: Callable[[PyTree], AbstractGeometry]
    z: Output
    targets: PyTree

    def mv(self, u):
        return self._map(lambda geometry, z, u: geometry.metric_mv(z, u), u)

    def root_mv(self, u):
        return self.as_columns().root_mv(u)

    def root_transpose_mv(self, c):
        return self.as_columns().root_transpose_mv(c)

    def sample(self, key):
        keys = jax.random.split(key, jax.tree.leaves(self.z)[0].shape[0])
        return self._map(lambda geometry, z, key: geometry.sample(z, key), keys)

    @property
    def root_size(self):
        return ColumnsOutputMetric(jax.eval_shape(self._factors)).root_size

    def coordinates(self, cotangents):
        return self.as_columns().coordinates(cotangents)

    def _factors(self):
        return self._map(lambda geometry, z, _: geometry.factor(z), None)

    def as_columns(self):
        return ColumnsOutputMetric(self._factors())

    def _map(self, function, extra):
        mapped = jax.vmap(lambda z, target, e: function(self.geometry_of(target), z, e))
        return mapped(self.z, self.targets, extra)


class ColumnsOutputMetric(AbstractOutputMetric):
    r"""The average of $s s^\top$ over given cotangents, or their covariance over examples.

    `columns` are like the outputs, with an axis over columns after that of examples."""

    columns: Output
    is_centred: bool = eqx.field(default=False, static=True)

    def as_columns(self):
        return self

    def mv(self, u):
        return self.root_transpose_mv(self.root_mv(u))

    def root_mv(self, u):
        products = jax.tree.map(
            lambda s, u: jnp.sum((s * u[:, None]).reshape(*s.shape[:2], -1).astype(_tree.wide(s)), axis=-1),
            self.columns,
            u,
        )
        return self._centre(_tree.sum_leaves(products)).reshape(-1)

    def root_transpose_mv(self, c):
        c = self._centre(c.reshape(self._shape))
        return jax.tree.map(lambda s: jnp.einsum("nc,nc...->n...", c.astype(s.dtype), s), self.columns)

    def sample(self, key):
        noise = jax.random.normal(key, (self.root_size,), _tree.wide(jax.tree.leaves(self.columns)[0]))
        return self.root_transpose_mv(noise)

    @property
    def root_size(self):
        return self._shape[0] * self._shape[1]

    def coordinates(self, cotangents):
        def of_one(columns, cotangent):
            rows = jax.vmap(lambda column: _tree.flatten(column)[0])(columns)
            return _linalg.least_squares(rows.T, _tree.flatten(cotangent)[0].astype(rows.dtype)[:, None])[:, 0]

        return jax.vmap(of_one)(self.columns, cotangents).reshape(-1)

    @property
    def _shape(self):
        return jax.tree.leaves(self.columns)[0].shape[:2]

    def _centre(self, c):
        return c - jnp.mean(c, axis=0, keepdims=True) if self.is_centred else c


class CentredOutputMetric(AbstractOutputMetric):
    """A metric on outputs that are known only up to a constant, the same for all examples."""

    metric: AbstractOutputMetric

    def mv(self, u):
        return centre(self.metric.mv(centre(u)))

    def root_mv(self, u):
        return self.metric.root_mv(centre(u))

    def root_transpose_mv(self, c):
        return centre(self.metric.root_transpose_mv(c))

    def sample(self, key):
        return centre(self.metric.sample(key))

    @property
    def root_size(self):
        return self.metric.root_size

    def coordinates(self, cotangents):
        return self.metric.coordinates(cotangents)


def centre(u: Output) -> Output:
    return jax.tree.map(lambda leaf: leaf - jnp.mean(leaf, axis=0, keepdims=True), u)
