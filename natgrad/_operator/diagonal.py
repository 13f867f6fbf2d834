import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad._operator.base import AbstractBlock, reciprocal


class DiagonalBlock(AbstractBlock):
    """One number for every entry."""

    values: Float[Array, "g d o"]

    def mv(self, v):
        return self.values * v

    def as_matrix(self):
        return jax.vmap(jnp.diag)(self.values.reshape(len(self.values), -1))

    def diagonal(self):
        return self.values

    def matrices(self):
        return []

    def eigenvalues(self, eigen):
        return self.values

    def function(self, eigen, f):
        return DiagonalBlock(f(self.values))

    def inverted(self, inverses, damping):
        return DiagonalBlock(reciprocal(self.values + damping.astype(self.values.dtype)))

    def with_unit_diagonal(self):
        return DiagonalBlock((self.values > 0).astype(self.values.dtype))
