import jax
from jaxtyping import PyTree

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

    def diagonal(self):
        return self.scaled(self.scaled(self.metric.diagonal()))

    def _sample(self, key):
        return self.scaled(self.metric._sample(key))

    def in_structure(self):
        return self.metric.in_structure()

    def scaled(self, tree: PyTree) -> PyTree:
        return jax.tree.map(lambda s, leaf: s.astype(leaf.dtype) * leaf, self.scales, tree)
