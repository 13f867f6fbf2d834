import math

import jax.numpy as jnp
import numpy as np

from natgrad._check import Requirement
from natgrad._family.base import AbstractFamily
from natgrad._family.counts import draw_poisson, log_factorial, mean_count, mean_log_factorial, whole_numbers
from natgrad._family.special import horner, measure_kl

# Above this rate the entropy is a series in 1/rate, exact to rounding; below, an integral.
LARGE_RATE = 100.0
ENTROPY_SERIES = (1 / 12, 1 / 24, 19 / 360, 9 / 80, 863 / 2520, 1375 / 1008, 33953 / 5040, 57281 / 1440)


class Poisson(AbstractFamily):
    r"""A count with rate $\lambda$: $\eta = \log\lambda$, $t(x) = x$, $\log Z = e^\eta$, base measure $1/x!$.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    family = ng.Poisson()
    eta = jnp.log(jnp.array(3.0))
    assert jnp.allclose(family.to_moments(eta), 3.0)
    assert jnp.allclose(family.fisher(eta), 3.0)
    ```
    """

    @property
    def _event_shapes(self):
        return ((),)

    def _log_partition(self, eta):
        return jnp.sum(jnp.exp(eta))

    def _statistics(self, x):
        return x

    def _draw(self, eta, key):
        return draw_poisson(jnp.exp(eta), key)

    def _natural_domain(self, eta):
        limit = math.log(float(np.finfo(eta.dtype).max))
        return [
            Requirement(
                jnp.all(eta < limit),
                f"log rates below {limit:.1f}, where the rate overflows {eta.dtype}",
                "Divide the counts by a unit, or use float64.",
            )
        ]

    def _moment_domain(self, xi):
        return [Requirement(jnp.all(xi > 0), "rates above 0", "Add a pseudo-count if nothing was counted.")]

    def _support(self, x):
        return whole_numbers(x)

    def _target_domain(self, x):
        return [mean_count(x)]

    def _log_base_measure(self, x):
        return -jnp.sum(log_factorial(x))

    def _to_moments(self, eta):
        return jnp.exp(eta)

    def _to_natural(self, xi):
        return jnp.log(xi)

    def _event_factor(self, eta):
        return jnp.exp(eta / 2)[None]

    def _kl(self, eta1, eta2):
        return jnp.sum(measure_kl(jnp.exp(eta1), jnp.exp(eta2), eta2 - eta1))

    def _mean_log_base_measure(self, eta):
        return self._log_partition(eta) - jnp.sum(eta * jnp.exp(eta)) - self._entropy(eta)

    def _entropy(self, eta):
        rate = jnp.exp(eta)
        is_large = rate > LARGE_RATE
        # Each formula sees rates of its own side only: outside, its derivatives may be infinite.
        large = jnp.where(is_large, rate, LARGE_RATE)
        series = 0.5 * jnp.log(2 * math.pi * math.e * large) - horner(ENTROPY_SERIES, 1 / large) / large
        small = jnp.where(is_large, LARGE_RATE, rate)

        def log_laplace(t):
            return small * jnp.expm1(-t)

        integral = small * (1 - jnp.log(small)) + mean_log_factorial(small, log_laplace)
        return jnp.sum(jnp.where(is_large, series, integral))
