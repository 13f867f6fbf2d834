import jax.numpy as jnp

from natgrad._check import Requirement
from natgrad._family.dirichlet import AbstractLogFamily, draw_log_simplex


class Beta(AbstractLogFamily):
    r"""A probability $x$: $\eta = (\alpha, \beta)$ along the last axis, $t(x) = (\log x, \log(1 - x))$,
    $\log Z = \log B(\alpha, \beta)$, base measure $1/(x(1-x))$ (so that the parameters are $\alpha$ and $\beta$
    themselves). The Dirichlet family of two classes, with a number for data."""

    @property
    def _event_shapes(self):
        return ((2,),)

    def _statistics(self, x):
        return jnp.stack([jnp.log(x), jnp.log1p(-x)], axis=-1)

    def _draw(self, eta, key):
        return jnp.exp(draw_log_simplex(eta, key)[..., 0])

    def _support(self, x):
        return [Requirement(jnp.all((x > 0) & (x < 1)), "numbers strictly between 0 and 1", "Squeeze the data.")]
