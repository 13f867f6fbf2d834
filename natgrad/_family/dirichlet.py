"""Dirichlet and beta distributions."""

import jax
import jax.numpy as jnp

from natgrad._check import Requirement
from natgrad._family.base import AbstractFamily
from natgrad._family.special import alpha_guess, dirichlet_entropy, dirichlet_kl, log_beta, mean_logs


class AbstractLogFamily(AbstractFamily):
    """What the families share whose statistics are the logarithms of probabilities."""

    @property
    def moves_samples(self):
        return True

    def _log_partition(self, eta):
        return jnp.sum(log_beta(eta))

    def _natural_domain(self, eta):
        return [Requirement(jnp.all(eta > 0), "concentrations above 0", "Pass `alpha`, not `alpha - 1`.")]

    def _moment_domain(self, xi):
        return [
            Requirement(
                jnp.all(jax.nn.logsumexp(xi, axis=-1) < 0),
                "mean log probabilities whose exponentials sum to less than 1 (Jensen)",
                "All observations may be equal, or nearly so for this precision: use float64 or more data.",
            )
        ]

    def _log_base_measure(self, x):
        return -jnp.sum(self._statistics(x))

    def _mean_log_base_measure(self, eta):
        return -jnp.sum(mean_logs(eta))

    def _to_moments(self, eta):
        return mean_logs(eta)

    def _initial_natural(self, xi):
        return alpha_guess(xi)

    def _kl(self, eta1, eta2):
        return jnp.sum(dirichlet_kl(eta1, eta2))

    def _entropy(self, eta):
        return jnp.sum(dirichlet_entropy(eta))

    def _draw_score(self, eta, key):
        return draw_log_simplex(eta, key) - mean_logs(eta)


class Dirichlet(AbstractLogFamily):
    r"""A probability vector $x$ over $K$ classes, with the parameters $\eta = \alpha$.

    $t(x) = \log x$, $\log Z = \sum_k\log\Gamma(\alpha_k) - \log\Gamma(\sum_k\alpha_k)$, base measure $\prod_k 1/x_k$
    (so that the parameter is $\alpha$ and not $\alpha - 1$).

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    family = ng.Dirichlet()
    uniform = jnp.ones(3)
    assert jnp.allclose(jnp.exp(family.log_prob(uniform, jnp.array([0.2, 0.3, 0.5]))), 2.0)  # the simplex has area 1/2
    ```
    """

    @property
    def observation_ndim(self):
        return 1

    @property
    def _event_shapes(self):
        return ((None,),)

    def _statistics(self, x):
        return jnp.log(x)

    def _draw(self, eta, key):
        return jnp.exp(draw_log_simplex(eta, key))

    def _support(self, x):
        # Probabilities that were computed add up to one with half of their digits at least; percentages do not.
        slack = jnp.sqrt(jnp.finfo(x.dtype).eps)
        return [
            Requirement(jnp.all(x > 0), "probabilities above 0", "Smooth them first."),
            Requirement(
                jnp.all(jnp.abs(jnp.sum(x, axis=-1) - 1) <= slack), "probabilities that sum to 1", "Normalise them."
            ),
        ]


def draw_log_simplex(alpha, key):
    """Logarithms of a Dirichlet draw: small concentrations would underflow."""
    return jax.nn.log_softmax(jax.random.loggamma(key, alpha, dtype=alpha.dtype), axis=-1)


class Beta(AbstractLogFamily):
    r"""A probability $x$, with the parameters $\eta = (\alpha, \beta)$ along the last axis.

    $t(x) = (\log x, \log(1 - x))$, $\log Z = \log B(\alpha, \beta)$, base measure $1/(x(1-x))$ (so that the parameters
    are $\alpha$ and $\beta$ themselves). The Dirichlet family of two classes, with a number for data.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    family = ng.Beta()
    eta = jnp.array([2.0, 1.0])
    assert jnp.allclose(jnp.exp(family.log_prob(eta, jnp.array(0.5))), 1.0)  # the density is 2x
    ```
    """

    @property
    def _event_shapes(self):
        return ((2,),)

    def _statistics(self, x):
        return jnp.stack([jnp.log(x), jnp.log1p(-x)], axis=-1)

    def _draw(self, eta, key):
        return jnp.exp(draw_log_simplex(eta, key)[..., 0])

    def _support(self, x):
        return [Requirement(jnp.all((x > 0) & (x < 1)), "numbers strictly between 0 and 1", "Squeeze the data.")]
