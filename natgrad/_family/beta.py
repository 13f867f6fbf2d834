import jax.numpy as jnp

from natgrad._check import Requirement
from natgrad._family.base import AbstractFamily
from natgrad._family.dirichlet import concentrations, draw_log_simplex, mean_log_domain
from natgrad._family.special import alpha_guess, dirichlet_entropy, dirichlet_kl, log_beta, mean_logs


class Beta(AbstractFamily):
    r"""A probability $x$: $\eta = (\alpha, \beta)$ along the last axis, $t(x) = (\log x, \log(1 - x))$,
    $\log Z = \log B(\alpha, \beta)$, base measure $1/(x(1-x))$ (so that the parameters are $\alpha$ and $\beta$
    themselves). The Dirichlet family of two classes, with a number for data."""

    @property
    def _event_shapes(self):
        return ((2,),)

    def _log_partition(self, eta):
        return jnp.sum(log_beta(eta))

    def _statistics(self, x):
        return jnp.stack([jnp.log(x), jnp.log1p(-x)], axis=-1)

    def _draw(self, eta, key):
        return jnp.exp(draw_log_simplex(eta, key)[..., 0])

    def _natural_domain(self, eta):
        return concentrations(eta)

    def _moment_domain(self, xi):
        return mean_log_domain(xi)

    def _support(self, x):
        return [Requirement(jnp.all((x > 0) & (x < 1)), "numbers strictly between 0 and 1", "Squeeze the data.")]

    def _log_base_measure(self, x):
        return -jnp.sum(jnp.log(x) + jnp.log1p(-x))

    def _mean_log_base_measure(self, eta):
        return -jnp.sum(mean_logs(eta))

    def _kl(self, eta1, eta2):
        return jnp.sum(dirichlet_kl(eta1, eta2))

    def _entropy(self, eta):
        return jnp.sum(dirichlet_entropy(eta))

    def _to_moments(self, eta):
        return mean_logs(eta)

    def _initial_natural(self, xi):
        return alpha_guess(xi)

    def _draw_score(self, eta, key):
        return draw_log_simplex(eta, key) - mean_logs(eta)
