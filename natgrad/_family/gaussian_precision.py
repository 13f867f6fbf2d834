import math

import equinox as eqx
import jax
import jax.numpy as jnp

from natgrad import _linalg
from natgrad._family.base import AbstractFamily
from natgrad._family.special import log_divergence
from natgrad._family.symmetric import orthonormal_basis, outer, positive_definite, symmetrise


class GaussianPrecision(AbstractFamily):
    r"""A Gaussian of mean zero in terms of its precision: $\eta = \Lambda = \Sigma^{-1}$.

    $t(x) = -\frac12 x x^\top$, $\log Z = -\frac12\log|\Lambda| + \frac d2\log 2\pi$.

    The parameter is a symmetric matrix, stored whole and paired by the trace inner product.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    family = ng.GaussianPrecision(2)
    moments = family.to_moments(jnp.diag(jnp.array([2.0, 4.0])))
    assert jnp.allclose(moments, -jnp.diag(jnp.array([0.5, 0.25])) / 2)  # minus half the covariance
    ```
    """

    dim: int | None = eqx.field(default=None, static=True)

    def __check_init__(self):
        if self.dim is not None and self.dim < 1:
            raise ValueError(f"`GaussianPrecision` needs a dimension of at least 1, but got `dim={self.dim}`.")

    @property
    def observation_ndim(self):
        return 1

    @property
    def moves_samples(self):
        return True

    @property
    def _event_shapes(self):
        return ((self.dim, self.dim),)

    def _log_partition(self, eta):
        return log_normaliser(cholesky(eta))

    def _statistics(self, x):
        return -outer(x, x) / 2

    def _draw(self, eta, key):
        return draw_centred(cholesky(eta), key)

    def _natural_domain(self, eta):
        return positive_definite(eta, "the precision")

    def _moment_domain(self, xi):
        return positive_definite(-2 * xi, "the covariance `-2 xi`")

    def _support(self, x):
        return []

    def _to_moments(self, eta):
        return -inverse(eta) / 2

    def _to_natural(self, xi):
        return inverse(-2 * xi)

    def _fisher_mv(self, eta, v):
        covariance = inverse(eta)
        return covariance @ symmetrise(v) @ covariance / 2

    def _event_factor(self, eta):
        # t = -1/2 R e e' R' with R R' = Sigma and e standard normal; Var(e_i e_j) = 1, Var(e_i^2) = 2.
        root = covariance_root(cholesky(eta))
        return -(root @ orthonormal_basis(eta.shape[-1], eta.dtype) @ root.T) / math.sqrt(2)

    def _kl(self, eta1, eta2):
        return kl_centred(cholesky(eta1), cholesky(eta2))


def cholesky(matrix):
    return _linalg.cholesky(symmetrise(matrix))


def inverse(matrix):
    return symmetrise(_linalg.inverse(symmetrise(matrix)))


def covariance_root(precision_root):
    r"""$R$ with $R R^\top = \Lambda^{-1}$, from the Cholesky factor of $\Lambda$."""
    return _linalg.triangular_solve(precision_root, _linalg.identity_like(precision_root), transposed=True)


def draw_centred(precision_root, key):
    noise = jax.random.normal(key, precision_root.shape[:-1], precision_root.dtype)
    return _linalg.triangular_solve(precision_root, noise[..., None], transposed=True)[..., 0]


def half_log_determinant(root):
    return jnp.sum(jnp.log(jnp.diagonal(root, axis1=-2, axis2=-1)))


def log_normaliser(precision_root):
    size = precision_root[..., 0].size
    return size / 2 * math.log(2 * math.pi) - half_log_determinant(precision_root)


def kl_centred(root1, root2):
    r"""$\frac12(\operatorname{tr}(\Lambda_2\Sigma_1) - d + \log|\Lambda_1| - \log|\Lambda_2|)$, from Cholesky factors.

    With $C = L_1^{-1}L_2$, which is triangular, that is $\frac12\sum_i(C_{ii}^2 - 1 - \log C_{ii}^2)$ and half the
    squares below the diagonal: non-negative terms, none of which cancels."""
    mixed = _linalg.triangular_solve(root1, root2)
    scales = jnp.diagonal(mixed, axis1=-2, axis2=-1) ** 2
    return (jnp.sum(log_divergence(jnp.ones_like(scales), scales)) + jnp.sum(jnp.tril(mixed, -1) ** 2)) / 2
