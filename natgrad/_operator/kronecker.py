import jax
import jax.numpy as jnp

from natgrad._operator import factor
from natgrad._operator.base import AbstractBlock
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

    def damped(self, damping):
        r"""$(A + \pi\sqrt\lambda I) \otimes (G + \frac{\sqrt\lambda}{\pi} I)$ with $\pi^2$ the ratio of the mean
        eigenvalues of $A$ and $G$: more damping than $\lambda I$, but a Kronecker product again.

        Where one factor is zero the product is, and the damped block is $\lambda I$."""
        sizes = [factor.trace(F) / factor.dim(F) for F in (self.A, self.G)]
        is_zero = (sizes[0] <= 0) | (sizes[1] <= 0)
        roots = [jnp.sqrt(jnp.where(is_zero, 1.0, size)) for size in sizes]
        ratio = roots[0] / roots[1]
        A, G = (jnp.where(is_zero[:, None, None, None], 0.0, F) for F in (self.A, self.G))
        root = jnp.sqrt(damping).astype(A.dtype)
        return KroneckerBlock(factor.add_identity(A, ratio * root), factor.add_identity(G, root / ratio))

    def inverted(self, inverses):
        return KroneckerBlock(*inverses)
