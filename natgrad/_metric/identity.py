import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._check import public
from natgrad._metric.base import AbstractMetric


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
