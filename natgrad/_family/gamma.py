import math

import jax
import jax.numpy as jnp

from natgrad._check import Requirement
from natgrad._family.base import AbstractFamily
from natgrad._family.special import (
    digamma_remainder,
    log_divergence,
    log_gamma,
    measure_kl,
    remainder_divergence,
    stirling_remainder,
)


class Gamma(AbstractFamily):
    r"""A positive number with shape $\alpha$ and rate $\beta$: $\eta = (\alpha, -\beta)$ along the last axis.

    $t(x) = (\log x, x)$, $\log Z = \log\Gamma(\alpha) - \alpha\log\beta$, base measure $1/x$.

    With the base measure $1/x$ the first parameter is $\alpha$ and not $\alpha - 1$, which would lose small shapes
    to rounding.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    family = ng.Gamma()
    mean_of_log, mean = family.to_moments(jnp.array([3.0, -2.0]))
    assert jnp.allclose(mean, 1.5)  # shape 3 over rate 2
    ```
    """

    @property
    def moves_samples(self):
        return True

    @property
    def _event_shapes(self):
        return ((2,),)

    def _log_partition(self, eta):
        shape, rate = eta[..., 0], -eta[..., 1]
        return jnp.sum(log_gamma(shape) - shape * jnp.log(rate))

    def _statistics(self, x):
        return jnp.stack([jnp.log(x), x], axis=-1)

    def _draw(self, eta, key):
        return jnp.exp(self._draw_log(eta, key))

    def _natural_domain(self, eta):
        return [
            Requirement(jnp.all(eta[..., 0] > 0), "shapes `eta[..., 0]` above 0", "Pass `(shape, -rate)`."),
            Requirement(jnp.all(eta[..., 1] < 0), "minus rates `eta[..., 1]` below 0", "Pass `(shape, -rate)`."),
        ]

    def _moment_domain(self, xi):
        return [
            Requirement(jnp.all(xi[..., 1] > 0), "means `xi[..., 1]` above 0", "Check the data."),
            Requirement(
                # Where the mean is not positive, which is refused above, `jax.debug_nans` would stop at the logarithm.
                jnp.all(xi[..., 0] < jnp.log(jnp.where(xi[..., 1] > 0, xi[..., 1], 1.0))),
                "mean logarithms `xi[..., 0]` below the logarithm of the mean (Jensen)",
                "All observations may be equal, or nearly so for this precision: use float64 or more data.",
            ),
        ]

    def _support(self, x):
        return [Requirement(jnp.all(x > 0), "numbers above 0", "Shift or drop the zeros.")]

    def _log_base_measure(self, x):
        return -jnp.sum(jnp.log(x))

    def _mean_log_base_measure(self, eta):
        return -jnp.sum(self._to_moments(eta)[..., 0])

    def _to_moments(self, eta):
        mean = eta[..., 0] / -eta[..., 1]
        return jnp.stack([jnp.log(mean) + digamma_remainder(eta[..., 0]), mean], axis=-1)

    def _kl(self, eta1, eta2):
        # The gamma functions split as in `special`: every term is non-negative.
        shape1, shape2 = eta1[..., 0], eta2[..., 0]
        scaled = shape1 * (eta2[..., 1] / eta1[..., 1])
        parts = (
            measure_kl(shape2, scaled, jnp.log(scaled / shape2)),
            log_divergence(shape1, shape2) / 2,
            remainder_divergence(shape1, shape2),
        )
        return jnp.sum(sum(parts))

    def _entropy(self, eta):
        shape, rate = eta[..., 0], -eta[..., 1]
        small = stirling_remainder(shape) + (1 - shape) * digamma_remainder(shape)
        return jnp.sum(jnp.log(2 * math.pi * shape) / 2 - jnp.log(rate) + small)

    def _initial_natural(self, xi):
        # Minka's approximation of the shape that solves log(shape) - digamma(shape) = gap, good to 1.5 %.
        gap = jnp.log(xi[1]) - xi[0]
        shape = (3 - gap + jnp.sqrt((gap - 3) ** 2 + 24 * gap)) / (12 * gap)
        return jnp.stack([shape, -shape / xi[1]])

    def _draw_score(self, eta, key):
        log_x = self._draw_log(eta, key)
        return jnp.stack([log_x, jnp.exp(log_x)], axis=-1) - self._to_moments(eta)

    def _draw_log(self, eta, key):
        # The logarithm, because small shapes underflow.
        return jax.random.loggamma(key, eta[..., 0], dtype=eta.dtype) - jnp.log(-eta[..., 1])
