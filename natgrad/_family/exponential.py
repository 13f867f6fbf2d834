import jax
import jax.numpy as jnp

from natgrad._check import Requirement
from natgrad._family.base import AbstractFamily


class Exponential(AbstractFamily):
    r"""A waiting time with rate $\lambda$: $\eta = -\lambda$, $t(x) = x$, $\log Z = -\log(-\eta)$.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    family = ng.Exponential()
    assert jnp.allclose(family.to_moments(jnp.array(-2.0)), 0.5)  # the mean waiting time at rate 2
    assert jnp.allclose(family.maximum_likelihood(jnp.array([1.0, 3.0])), -0.5)
    ```
    """

    @property
    def moves_samples(self):
        return True

    @property
    def _event_shapes(self):
        return ((),)

    def _log_partition(self, eta):
        return -jnp.sum(jnp.log(-eta))

    def _statistics(self, x):
        return x

    def _draw(self, eta, key):
        return jax.random.exponential(key, eta.shape, eta.dtype) / -eta

    def _natural_domain(self, eta):
        return [Requirement(jnp.all(eta < 0), "negative numbers (minus the rate)", "Pass `-rate`.")]

    def _moment_domain(self, xi):
        return [Requirement(jnp.all(xi > 0), "means above 0", "Average over more data.")]

    def _support(self, x):
        return [Requirement(jnp.all(x >= 0), "times of at least 0", "Check the data.")]

    def _to_moments(self, eta):
        return -1 / eta

    def _to_natural(self, xi):
        return -1 / xi

    def _event_factor(self, eta):
        return (-1 / eta)[None]

    def _kl(self, eta1, eta2):
        # With u = eta2 / eta1 - 1 the divergence is u - log(1 + u).
        excess = (eta2 - eta1) / eta1
        return jnp.sum(excess - jnp.log1p(excess))
