import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad._operator.base import AbstractBlock, to_unit_diagonal
from natgrad._operator.eigen import EigenBlock


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
        one = jnp.ones((len(vectors), 1, 1, 1), vectors.dtype)
        return EigenBlock(vectors[:, None], one, f(values)[:, :, None])

    def inverted(self, inverses, damping):
        return DenseBlock(*inverses)

    def with_unit_diagonal(self):
        return DenseBlock(to_unit_diagonal(self.matrix))
