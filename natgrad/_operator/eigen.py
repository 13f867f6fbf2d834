import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad._operator import factor
from natgrad._operator.base import AbstractBlock
from natgrad._operator.factor import Factor


class EigenBlock(AbstractBlock):
    r"""$(Q_A \otimes Q_G)\operatorname{diag}(S)(Q_A \otimes Q_G)^\top$ with orthogonal $Q_A$ and $Q_G$."""

    input_basis: Factor
    output_basis: Factor
    values: Float[Array, "g d o"]

    def mv(self, v):
        coordinates = factor.sandwich(self.input_basis.mT, v, self.output_basis.mT)
        return factor.sandwich(self.input_basis, self.values * coordinates, self.output_basis)

    def as_matrix(self):
        bases = factor.as_matrix(self.input_basis), factor.as_matrix(self.output_basis)
        basis = jax.vmap(jnp.kron)(*bases)
        return (basis * self.values.reshape(len(basis), 1, -1)) @ basis.mT

    def diagonal(self):
        return factor.sandwich(self._squared(self.input_basis), self.values, self._squared(self.output_basis))

    def matrices(self):
        return []

    def eigenvalues(self, eigen):
        return self.values

    def function(self, eigen, f):
        return EigenBlock(self.input_basis, self.output_basis, f(self.values))

    def damped(self, damping):
        return self.function([], lambda s: s + damping.astype(s.dtype))

    def inverted(self, inverses):
        return self.function([], lambda s: 1 / s)

    @property
    def factor_shapes(self):
        return self.input_basis.shape, self.output_basis.shape, self.values.shape

    def _squared(self, basis: Factor) -> Factor:
        return basis**2
