"""Metrics on the outputs of a batch: the middle factor $M = S S^\\top$ of a pulled-back metric
$\\frac1N J^\\top M J$."""

from abc import abstractmethod

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad import _linalg, _tree
from natgrad._point.batch import spread
from natgrad._point.point import Point
from natgrad._types import Key, Output


class AbstractOutputMetric(eqx.Module):
    r"""A positive semidefinite operator $M = S S^\top$ on the outputs of a point, usually one block an example.

    Rows of its root are ordered by columns, then by examples."""

    @abstractmethod
    def mv(self, point: Point, u: Output) -> Output: ...

    @abstractmethod
    def root_mv(self, point: Point, u: Output) -> Float[Array, " rows"]:
        r"""$S^\top u$."""

    @abstractmethod
    def root_transpose_mv(self, point: Point, c: Float[Array, " rows"]) -> Output:
        r"""$S c$."""

    @abstractmethod
    def sample(self, point: Point, key: Key) -> Output:
        r"""Cotangents with mean zero and covariance $M$."""

    @abstractmethod
    def root_size(self, point: Point) -> int: ...

    def as_columns(self, point: Point) -> "ColumnsOutputMetric | None":
        """The metric as columns for each example; `None` where its rows mix examples."""
        del point
        return None

    @abstractmethod
    def coordinates(self, point: Point, cotangents: Output) -> Float[Array, " rows"]:
        r"""$c$ of least norm with $S c$ closest to `cotangents`."""


class ExactOutputMetric(AbstractOutputMetric):
    """The metric of the geometry at every output."""

    def mv(self, point, u):
        return point.metric_mv(u)

    def root_mv(self, point, u):
        return self.as_columns(point).root_mv(point, u)

    def root_transpose_mv(self, point, c):
        return self.as_columns(point).root_transpose_mv(point, c)

    def sample(self, point, key):
        keys = jax.random.split(key, point.num_examples)
        return jax.tree.map(lambda draw: draw[0], point.sampled_columns(keys[None]))

    def root_size(self, point):
        return ColumnsOutputMetric(jax.eval_shape(point.exact_columns)).root_size(point)

    def coordinates(self, point, cotangents):
        return self.as_columns(point).coordinates(point, cotangents)

    def as_columns(self, point):
        return ColumnsOutputMetric(point.exact_columns())


class ColumnsOutputMetric(AbstractOutputMetric):
    r"""The sum of $s s^\top$ over the columns $s$ of every example, or their covariance over examples.

    `columns` are like the outputs, with an axis over columns in front."""

    columns: Output
    is_centred: bool = eqx.field(default=False, static=True)

    def as_columns(self, point):
        return self

    def mv(self, point, u):
        return self.root_transpose_mv(point, self.root_mv(point, u))

    def root_mv(self, point, u):
        products = jax.tree.map(
            lambda s, u: jnp.sum((s * u[None]).reshape(*s.shape[:2], -1).astype(_tree.wide(s)), axis=-1),
            self.columns,
            u,
        )
        return self._centre(_tree.sum_leaves(products)).reshape(-1)

    def root_transpose_mv(self, point, c):
        c = self._centre(c.reshape(self.shape))
        return jax.tree.map(lambda s: jnp.sum(spread(c, s).astype(s.dtype) * s, axis=0), self.columns)

    def sample(self, point, key):
        size = self.root_size(point)
        noise = jax.random.normal(key, (size,), _tree.wide(jax.tree.leaves(self.columns)[0]))
        return self.root_transpose_mv(point, noise)

    def root_size(self, point):
        return self.shape[0] * self.shape[1]

    def coordinates(self, point, cotangents):
        def of_one(columns, cotangent):
            rows = jax.vmap(lambda column: _tree.flatten(column)[0])(columns)
            return _linalg.least_squares(rows.T, _tree.flatten(cotangent)[0].astype(rows.dtype)[:, None])[:, 0]

        return jax.vmap(of_one, in_axes=(1, 0), out_axes=1)(self.columns, cotangents).reshape(-1)

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of columns and of examples."""
        return jax.tree.leaves(self.columns)[0].shape[:2]

    def _centre(self, c):
        return c - jnp.mean(c, axis=1, keepdims=True) if self.is_centred else c


class CentredOutputMetric(AbstractOutputMetric):
    """A metric on outputs that are known only up to a constant, the same for all examples."""

    metric: AbstractOutputMetric

    def mv(self, point, u):
        return centre(self.metric.mv(point, centre(u)))

    def root_mv(self, point, u):
        return self.metric.root_mv(point, centre(u))

    def root_transpose_mv(self, point, c):
        return centre(self.metric.root_transpose_mv(point, c))

    def sample(self, point, key):
        return centre(self.metric.sample(point, key))

    def root_size(self, point):
        return self.metric.root_size(point)

    def coordinates(self, point, cotangents):
        return self.metric.coordinates(point, cotangents)


def centre(u: Output) -> Output:
    return jax.tree.map(lambda leaf: leaf - jnp.mean(leaf, axis=0, keepdims=True), u)
