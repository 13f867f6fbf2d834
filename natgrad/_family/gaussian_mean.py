import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad import _linalg
from natgrad._check import Requirement, real_array, require
from natgrad._family.base import AbstractFamily, all_finite
from natgrad._family.symmetric import positive_definite, symmetrise


class GaussianMean(AbstractFamily):
    r"""A Gaussian of known covariance $\Sigma$: $\eta = \Sigma^{-1}\mu$, $t(x) = x$.

    $\log Z = \frac12\eta^\top\Sigma\eta$, and the base measure is the density of $\mathcal{N}(0, \Sigma)$.

    The covariance is a number (one variance for every entry of arrays of any shape), a vector of variances, or a
    matrix.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    family = ng.GaussianMean(4.0)  # a variance of 4
    eta = jnp.array([0.5, -1.0])
    assert jnp.allclose(family.to_moments(eta), 4 * eta)
    assert jnp.allclose(family.kl(eta, eta + 1), 4.0)  # half the variance for each of two entries
    ```
    """

    covariance: Float[Array, "..."]

    def __init__(self, covariance: object = 1.0):
        label = "`GaussianMean`: `covariance`"
        covariance = real_array(covariance, label)
        if covariance.ndim > 2 or (covariance.ndim == 2 and covariance.shape[0] != covariance.shape[1]):
            raise ValueError(
                f"{label} must be a number, a vector of variances or a square matrix, but got shape {covariance.shape}."
            )
        if covariance.ndim == 2:
            requirements = [all_finite(covariance), *positive_definite(covariance, "it")]
            self.covariance = symmetrise(require(covariance, requirements, label))
        else:
            positive = Requirement(jnp.all(covariance > 0), "positive variances", "Pass variances, not deviations.")
            self.covariance = require(covariance, [all_finite(covariance), positive], label)

    @property
    def observation_ndim(self):
        return min(self.covariance.ndim, 1)

    @property
    def moves_samples(self):
        return True

    @property
    def _event_shapes(self):
        return (self.covariance.shape[:1],)

    def _log_partition(self, eta):
        return jnp.sum(eta * self._to_moments(eta)) / 2

    def _statistics(self, x):
        return x

    def _draw(self, eta, key):
        noise = jax.random.normal(key, eta.shape, eta.dtype)
        return self._to_moments(eta) + multiply(self._root(eta.dtype), noise)

    def _natural_domain(self, eta):
        return []

    def _moment_domain(self, xi):
        return []

    def _support(self, x):
        return []

    def _log_base_measure(self, x):
        return self._log_normaliser(x) - jnp.sum(x * self._to_natural(x)) / 2

    def _mean_log_base_measure(self, eta):
        # E x' Sigma^-1 x = d + mu' Sigma^-1 mu, and mu' Sigma^-1 mu = eta' Sigma eta.
        return self._log_normaliser(eta) - eta.size / 2 - self._log_partition(eta)

    def _to_moments(self, eta):
        return multiply(self.covariance.astype(eta.dtype), eta)

    def _to_natural(self, xi):
        covariance = self.covariance.astype(xi.dtype)
        if covariance.ndim < 2:
            return xi / jnp.broadcast_to(covariance, xi.shape)
        solved = _linalg.cholesky_solve(self._root(xi.dtype), xi.reshape(-1, xi.shape[-1]).T)
        return solved.T.reshape(xi.shape)

    def _event_factor(self, eta):
        root = self._root(eta.dtype)
        return root.T if root.ndim == 2 else jnp.diag(jnp.atleast_1d(root)).reshape(-1, *eta.shape)

    def _kl(self, eta1, eta2):
        return self._log_partition(eta1 - eta2)

    def _entropy(self, eta):
        return eta.size / 2 - self._log_normaliser(eta)

    def _root(self, dtype):
        covariance = self.covariance.astype(dtype)
        return _linalg.cholesky(covariance) if covariance.ndim == 2 else jnp.sqrt(covariance)

    def _log_normaliser(self, x):
        """Log density of the base measure at zero, summed over the events of an array like `x`."""
        root = self._root(x.dtype)
        log_scales = jnp.log(jnp.diagonal(root) if root.ndim == 2 else root)
        return -jnp.sum(jnp.broadcast_to(log_scales, x.shape)) - x.size / 2 * math.log(2 * math.pi)


def multiply(matrix: Array, v: Array) -> Array:
    """`matrix` times each event of `v`, where a number or a vector stands for a diagonal matrix."""
    return v @ matrix.T if matrix.ndim == 2 else jnp.broadcast_to(matrix, v.shape) * v
