import jax
import jax.numpy as jnp
from jax.nn import log_sigmoid, sigmoid, softplus

from natgrad._check import Requirement
from natgrad._family.base import AbstractFamily
from natgrad._family.special import measure_kl


class Bernoulli(AbstractFamily):
    r"""A yes-or-no outcome: $\eta = \log\frac{p}{1-p}$, $t(x) = x$, $\log Z = \log(1 + e^\eta)$.

    `log_prob` is linear in $x$ and takes targets anywhere in $[0, 1]$, which gives the cross-entropy used for
    grey images and soft labels.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    family = ng.Bernoulli()
    assert jnp.allclose(family.to_moments(jnp.array(0.0)), 0.5)
    assert jnp.allclose(family.log_prob(jnp.array(0.0), jnp.array(1)), jnp.log(0.5))
    ```
    """

    @property
    def _event_shapes(self):
        return ((),)

    def _log_partition(self, eta):
        return jnp.sum(softplus(eta))

    def _statistics(self, x):
        return x

    def _draw(self, eta, key):
        return jax.random.bernoulli(key, sigmoid(eta)).astype(eta.dtype)

    def _natural_domain(self, eta):
        return []

    def _moment_domain(self, xi):
        return [
            Requirement(
                jnp.all((xi > 0) & (xi < 1)),
                "probabilities strictly between 0 and 1",
                "Smooth the counts first, for instance with `(k + 1) / (n + 2)`.",
            )
        ]

    def _support(self, x):
        return [Requirement(jnp.all((x >= 0) & (x <= 1)), "values from 0 to 1", "Rescale the data.")]

    def _to_moments(self, eta):
        return sigmoid(eta)

    def _to_natural(self, xi):
        return jnp.log(xi) - jnp.log1p(-xi)

    def _fisher_mv(self, eta, v):
        # Not `p * (1 - p)`, which rounds to zero for large logits.
        return sigmoid(eta) * sigmoid(-eta) * v

    def _event_factor(self, eta):
        return jnp.exp((log_sigmoid(eta) + log_sigmoid(-eta)) / 2)[None]

    def _log_prob(self, eta, x):
        # The linear part is exactly zero where the logarithm is small, so nothing cancels; chosen by `where`, both have
        # the right derivatives at zero too.
        is_positive = eta > 0
        linear = jnp.where(is_positive, (x - 1) * eta, x * eta)
        return jnp.sum(linear - jnp.log1p(jnp.exp(jnp.where(is_positive, -eta, eta))))

    def _kl(self, eta1, eta2):
        yes = measure_kl(sigmoid(eta1), sigmoid(eta2), log_sigmoid(eta2) - log_sigmoid(eta1))
        no = measure_kl(sigmoid(-eta1), sigmoid(-eta2), log_sigmoid(-eta2) - log_sigmoid(-eta1))
        return jnp.sum(yes + no)

    def _entropy(self, eta):
        return -jnp.sum(sigmoid(eta) * log_sigmoid(eta) + sigmoid(-eta) * log_sigmoid(-eta))
