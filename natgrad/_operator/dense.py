import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad._operator.base import AbstractBlock


class DenseBlock(AbstractBlock):
    """One symmetric matrix for every group, on its `d` times `o` entries. Groups of two are the scale and the shift of
    a unit."""

    matrix: Float[Array, "g n n"]

    def mv(self, v):
        flat = v.reshape(len(v), -1)
        return jnp.einsum("gnm,gm->gn", self.matrix, flat).reshape(v.shape)

    def as_matrix(self):
        return self.matrix

    def diagonal(self):
        return jnp.diagonal(self.matrix, axis1=-2, axis2=-1)[:, :, None]

    def matrices(self):
        return [self.matrix]

    def eigenvalues(self, eigen):
        return eigen[0].values[:, :, None]

    def function(self, eigen, f):
        ((values, vectors),) = eigen
        return DenseBlock((vectors * f(values)[:, None, :]) @ vectors.mT)

    def damped(self, damping):
        identity = jnp.eye(self.matrix.shape[-1], dtype=self.matrix.dtype)
        return DenseBlock(self.matrix + damping.astype(identity.dtype) * identity[None])

    def inverted(self, inverses):
        return DenseBlock(*inverses)
