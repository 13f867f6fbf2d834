import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad._operator.base import AbstractBlock


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

    def damped(self, damping):
        return DiagonalBlock(self.values + damping.astype(self.values.dtype))

    def inverted(self, inverses):
        return DiagonalBlock(1 / self.values)
