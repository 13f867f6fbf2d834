"""A metric in other units of the parameters."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from natgrad import _tree
from natgrad._metric.base import AbstractDerivedMetric, AbstractMetric


class RescaledMetric(AbstractDerivedMetric):
    r"""$S G S$ for a diagonal $S$: a metric in other units of the parameters, $S$ of the old ones each."""

    metric: AbstractMetric
    scales: PyTree

    def _mv(self, v):
        return self.scaled(self.metric._mv(self.scaled(v)))

    def root_mv(self, v):
        return self.metric.root_mv(self.scaled(v))

    def root_transpose_mv(self, u):
        return self.scaled(self.metric.root_transpose_mv(u))

    def as_matrix(self):
        s = self._flat_scales()
        return s[:, None] * self.metric.as_matrix() * s[None, :]

    def diagonal(self):
        return self.scaled(self.scaled(self.metric.diagonal()))

    def root_rows(self):
        return self.metric.root_rows() * self._flat_scales()[None, :]

    def _flat_scales(self) -> Float[Array, " P"]:
        return _tree.flatten(self.scaled(jax.tree.map(jnp.ones_like, self.metric._zeros())))[0]

    def _sample(self, key):
        return self.scaled(self.metric._sample(key))

    def in_structure(self):
        return self.metric.in_structure()

    def scaled(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda s, leaf: s.astype(leaf.dtype) * leaf, self.scales, tree)
