import jax
import jax.numpy as jnp

from natgrad._family.base import AbstractFamily
from natgrad._family.counts import (
    failures_kl,
    log_probability,
    log_success,
    mean_count,
    mean_failures,
    positive_mean,
    whole_numbers,
)


class Geometric(AbstractFamily):
    r"""Failures before the first success, $x = 0, 1, \dots$

    $\eta = \log(1 - p)$ for success probability $p$, $t(x) = x$, $\log Z = -\log(1 - e^\eta)$.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    family = ng.Geometric()
    eta = jnp.log(jnp.array(0.75))  # success with probability 1/4
    assert jnp.allclose(family.to_moments(eta), 3.0)
    assert jnp.allclose(jnp.exp(family.log_prob(eta, jnp.array(0))), 0.25)
    ```
    """

    @property
    def _event_shapes(self):
        return ((),)

    def _log_partition(self, eta):
        return -jnp.sum(log_success(eta))

    def _statistics(self, x):
        return x

    def _draw(self, eta, key):
        # P(x >= k) = e^(eta k), so x is an exponential waiting time of rate -eta, rounded down.
        return jnp.floor(jax.random.exponential(key, eta.shape, eta.dtype) / -eta)

    def _natural_domain(self, eta):
        return [log_probability(eta)]

    def _moment_domain(self, xi):
        return [positive_mean(xi)]

    def _support(self, x):
        return whole_numbers(x)

    def _target_domain(self, x):
        return [mean_count(x)]

    def _to_moments(self, eta):
        return mean_failures(eta)

    def _to_natural(self, xi):
        return -jnp.log1p(1 / xi)

    def _event_factor(self, eta):
        return (jnp.exp(eta / 2) / -jnp.expm1(eta))[None]

    def _kl(self, eta1, eta2):
        return jnp.sum(failures_kl(eta1, eta2))
