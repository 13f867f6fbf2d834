"""Blocks with the eigenvectors of a Kronecker product and any eigenvalues, as in EKFAC."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad._block import factor
from natgrad._block.base import AbstractBlock, reciprocal
from natgrad._block.factor import Factor
from natgrad._block.stacks import without_rounding


class EigenBlock(AbstractBlock):
    r"""$(Q_A \otimes Q_B)\operatorname{diag}(S)(Q_A \otimes Q_B)^\top$ with orthogonal $Q_A$ and $Q_B$."""

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
        return factor.sandwich(self.input_basis**2, self.values, self.output_basis**2)

    def matrices(self):
        return []

    def eigenvalues(self, eigen):
        return without_rounding(self.values, max(self.values.shape[1:]))

    def function(self, eigen, f):
        return EigenBlock(self.input_basis, self.output_basis, f(self.eigenvalues(eigen)))

    def inverted(self, inverses, damping):
        values = reciprocal(self.values + damping.astype(self.values.dtype))
        return EigenBlock(self.input_basis, self.output_basis, values)

    def with_unit_diagonal(self):
        raise TypeError("An `EigenBlock` has no such form: rescale the factors before their eigenvectors are computed.")
