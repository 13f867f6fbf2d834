import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad._check import Requirement, real_array, require
from natgrad._family.base import AbstractFamily, all_finite
from natgrad._family.counts import (
    draw_poisson,
    failures_kl,
    log_probability,
    log_success,
    mean_count,
    mean_failures,
    mean_log_rising,
    positive_mean,
    whole_numbers,
)
from natgrad._family.special import log_beta, log_gamma


class NegativeBinomial(AbstractFamily):
    r"""Failures before the $r$-th success, where $r$ = `count` is known, any positive number.

    $\eta = \log(1 - p)$ for success probability $p$, $t(x) = x$, $\log Z = -r\log(1 - e^\eta)$, base measure $\binom{x
    + r - 1}{x}$.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    family = ng.NegativeBinomial(2.0)
    eta = jnp.log(jnp.array(0.75))  # success with probability 1/4
    assert jnp.allclose(family.to_moments(eta), 6.0)
    ```
    """

    count: Float[Array, ""]

    def __init__(self, count: object):
        count = real_array(count, "`NegativeBinomial`: `count`")
        if count.ndim:
            raise ValueError(f"`NegativeBinomial`: `count` must be one number, but got shape {count.shape}.")
        positive = Requirement(count > 0, "a count above 0", "It is the number of successes to wait for.")
        self.count = require(count, [all_finite(count), positive], "`NegativeBinomial`: `count`")

    @property
    def _event_shapes(self):
        return ((),)

    def _log_partition(self, eta):
        return -self._count(eta) * jnp.sum(log_success(eta))

    def _statistics(self, x):
        return x

    def _draw(self, eta, key):
        # A Poisson count whose rate is gamma distributed.
        rate_key, count_key = jax.random.split(key)
        rate = jax.random.gamma(rate_key, self._count(eta), eta.shape, eta.dtype) * mean_failures(eta)
        return draw_poisson(rate, count_key)

    def _natural_domain(self, eta):
        return [log_probability(eta)]

    def _moment_domain(self, xi):
        return [positive_mean(xi)]

    def _support(self, x):
        return whole_numbers(x)

    def _target_domain(self, x):
        return [mean_count(x)]

    def _log_base_measure(self, x):
        # The binomial coefficient as a beta function, which keeps its digits where the counts are large.
        count = jnp.broadcast_to(self._count(x), x.shape)
        return -jnp.sum(log_beta(jnp.stack([x + 1, count], axis=-1)) + jnp.log(x + count))

    def _mean_log_base_measure(self, eta):
        count = self._count(eta)

        def log_laplace(t):
            return -count * jnp.log1p(mean_failures(eta) * -jnp.expm1(-t))

        return jnp.sum(mean_log_rising(count, log_laplace) - log_gamma(count))

    def _to_moments(self, eta):
        return self._count(eta) * mean_failures(eta)

    def _to_natural(self, xi):
        return -jnp.log1p(self._count(xi) / xi)

    def _event_factor(self, eta):
        # The variance is r e^eta / (1 - e^eta)^2.
        return (jnp.sqrt(self._count(eta)) * jnp.exp(eta / 2) / -jnp.expm1(eta))[None]

    def _kl(self, eta1, eta2):
        return self._count(eta1) * jnp.sum(failures_kl(eta1, eta2))

    def _count(self, like):
        return self.count.astype(like.dtype)
