import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array

from natgrad import _linalg
from natgrad._check import caller, public, require
from natgrad._family import gaussian_precision as centred
from natgrad._family.base import AbstractFamily, all_finite
from natgrad._family.symmetric import outer, positive_definite, symmetrise
from natgrad._types import Natural


class Gaussian(AbstractFamily):
    r"""A Gaussian of dimension `dim` in information form: $\eta = (\Lambda\mu, \Lambda)$ with $\Lambda = \Sigma^{-1}$.

    With $h = \Lambda\mu$: $t(x) = (x, -\frac12 x x^\top)$ and $\log Z = \frac12 h^\top\Lambda^{-1}h -
    \frac12\log|\Lambda| + \frac d2\log 2\pi$.

    The moments are $(\mu, -\frac12(\Sigma + \mu\mu^\top))$; `from_mean` and `to_mean` convert to the mean and
    covariance. The matrix is symmetric, stored whole and paired by the trace inner product.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    family = ng.Gaussian(2)
    eta = family.from_mean(jnp.array([1.0, -1.0]), jnp.diag(jnp.array([4.0, 1.0])))
    mean, covariance = family.to_mean(eta)
    assert jnp.allclose(mean, jnp.array([1.0, -1.0]))
    assert jnp.allclose(covariance, jnp.diag(jnp.array([4.0, 1.0])))
    ```
    """

    dim: int = eqx.field(static=True)

    def __check_init__(self):
        if self.dim < 1:
            raise ValueError(f"`Gaussian` needs a dimension of at least 1, but got `dim={self.dim}`.")

    @public
    def from_mean(self, mean: object, covariance: object) -> tuple[Array, Array]:
        r"""Natural parameters of $\mathcal{N}(\mu, \Sigma)$."""
        label = f"{caller()}: `(mean, covariance)`"
        arrays = self._arrays((mean, covariance), label)
        requirements = [all_finite(arrays), *positive_definite(arrays[1], "the covariance")]
        return natural_of(*require(arrays, requirements, label))

    @public
    def to_mean(self, eta: Natural) -> tuple[Array, Array]:
        r"""Mean and covariance of natural parameters."""
        h, precision = self._check_natural(eta)
        return mean_of(h, precision), centred.inverse(precision)

    @property
    def observation_ndim(self):
        return 1

    @property
    def moves_samples(self):
        return True

    @property
    def _event_shapes(self):
        return ((self.dim,), (self.dim, self.dim))

    def _log_partition(self, eta):
        h, precision = eta
        root = centred.cholesky(precision)
        whitened = _linalg.triangular_solve(root, h[..., None])
        return jnp.sum(whitened**2) / 2 + centred.log_normaliser(root)

    def _statistics(self, x):
        return x, -outer(x, x) / 2

    def _draw(self, eta, key):
        h, precision = eta
        return mean_of(h, precision) + centred.draw_centred(centred.cholesky(precision), key)

    def _natural_domain(self, eta):
        return positive_definite(eta[1], "the precision `eta[1]`")

    def _moment_domain(self, xi):
        return positive_definite(covariance_of(xi), "the covariance `-2 xi[1] - xi[0] xi[0]'`")

    def _support(self, x):
        return []

    def _to_moments(self, eta):
        h, precision = eta
        mean = mean_of(h, precision)
        return mean, -(centred.inverse(precision) + outer(mean, mean)) / 2

    def _to_natural(self, xi):
        return natural_of(xi[0], covariance_of(xi))

    def _event_factor(self, eta):
        # x = mu + R e gives t - xi = (R e, -1/2 (mu e'R' + R e mu') - 1/2 R (e e' - I) R').
        h, precision = eta
        mean = mean_of(h, precision)
        root = centred.covariance_root(centred.cholesky(precision))
        linear = -symmetrise(outer(jnp.broadcast_to(mean, root.shape), root.T))
        quadratic = centred.GaussianPrecision()._event_factor(precision)
        still = jnp.zeros((quadratic.shape[0], self.dim), h.dtype)
        return jnp.concatenate([root.T, still]), jnp.concatenate([linear, quadratic])

    def _kl(self, eta1, eta2):
        root1, root2 = centred.cholesky(eta1[1]), centred.cholesky(eta2[1])
        shift = (mean_of(*eta2) - mean_of(*eta1))[..., None]
        return centred.kl_centred(root1, root2) + jnp.sum((jnp.swapaxes(root2, -1, -2) @ shift) ** 2) / 2

    def _entropy(self, eta):
        root = centred.cholesky(eta[1])
        return eta[0].size / 2 + centred.log_normaliser(root)


def mean_of(h: Array, precision: Array) -> Array:
    return _linalg.cholesky_solve(centred.cholesky(precision), h[..., None])[..., 0]


def natural_of(mean: Array, covariance: Array) -> tuple[Array, Array]:
    precision = centred.inverse(covariance)
    return (precision @ mean[..., None])[..., 0], precision


def covariance_of(xi: tuple[Array, Array]) -> Array:
    return -2 * symmetrise(xi[1]) - outer(xi[0], xi[0])
