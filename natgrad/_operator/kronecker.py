import jax
import jax.numpy as jnp

from natgrad._operator import factor
from natgrad._operator.base import AbstractBlock, to_unit_diagonal
from natgrad._operator.eigen import EigenBlock
from natgrad._operator.factor import Factor


class KroneckerBlock(AbstractBlock):
    r"""$A \otimes G$: it takes a matrix $V$ to $A V G$, so that the inverse costs those of the two factors."""

    A: Factor
    G: Factor

    def mv(self, v):
        return factor.sandwich(self.A, v, self.G)

    def as_matrix(self):
        return jax.vmap(jnp.kron)(factor.as_matrix(self.A), factor.as_matrix(self.G))

    def diagonal(self):
        return factor.diagonal(self.A)[:, :, None] * factor.diagonal(self.G)[:, None, :]

    def matrices(self):
        return [self.A, self.G]

    def eigenvalues(self, eigen):
        inputs, outputs = map(factor.values, eigen)
        return inputs[:, :, None] * outputs[:, None, :]

    def function(self, eigen, f):
        return EigenBlock(eigen[0].vectors, eigen[1].vectors, f(self.eigenvalues(eigen)))

    @property
    def is_product(self):
        return True

    def inverted(self, inverses, damping):
        return KroneckerBlock(*inverses)

    def with_unit_diagonal(self):
        return KroneckerBlock(to_unit_diagonal(self.A), to_unit_diagonal(self.G))
