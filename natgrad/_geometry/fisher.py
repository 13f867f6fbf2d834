from collections.abc import Callable, Iterable

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from natgrad import _tree
from natgrad._check import Requirement, are_met, require
from natgrad._family.base import AbstractFamily, all_finite
from natgrad._geometry.base import AbstractGeometry
from natgrad._types import Natural, Output


class Fisher(AbstractGeometry):
    r"""The Kullback-Leibler divergence of an exponential family, with its Fisher information for a metric.

    Outputs are the natural parameters of the family, and then
    `dissimilarity(z, z0)` $= \mathrm{KL}(p_{z_0}, p_z)$, the Bregman divergence of $\log Z$, with
    $G_z = \nabla^2\log Z(z)$.

    If the model puts out something else, such as a scale or a rate, `chart` maps one output $z$ to natural
    parameters $\eta(z)$, and $G_z = (\partial\eta/\partial z)^\top F\,(\partial\eta/\partial z)$. The Fisher metric
    is then no longer the Hessian of the loss: it drops the curvature of the chart.

    `sample` draws an observation from the model and returns its score."""

    family: AbstractFamily
    chart: Callable[[Output], Natural] | None = eqx.field(
        default=None, converter=lambda chart: chart if chart is None else _tree.as_callable(chart)
    )

    def _dissimilarity(self, z, z0):
        return self.family._kl(self._natural(z0), self._natural(z))

    def _metric_mv(self, z, v):
        if self.chart is None:
            return self.family._fisher_mv(z, v)
        eta, push = jax.linearize(self.chart, z)
        return jax.linear_transpose(push, z)(self.family._fisher_mv(eta, push(v)))[0]

    def _factor(self, z):
        columns = self.family._fisher_factor(self._natural(z))
        return columns if self.chart is None else jax.vmap(self._pull(z))(columns)

    def _sample(self, z, key):
        score = self.family._draw_score(self._natural(z), key)
        return score if self.chart is None else self._pull(z)(score)

    def _check(self, z, method):
        name = "z" if self.chart is None else "chart(z)"
        label = f"`Fisher.{method}` of `{type(self.family).__name__}`: natural parameter `{name}`"
        eta = self.family._arrays(self._natural(z), label)
        require(eta, [all_finite(eta), *self.family._natural_domain(eta)], label, traced=False)

    def _contains(self, z):
        eta = self._natural(z)
        return are_met([all_finite(eta), *self.family._natural_domain(eta)])

    def _mirrored(self, z, c):
        """Moments move against the gradient in natural parameters."""
        if self.chart is not None:
            return None
        moments, there_is_one = moved(self.family._to_moments(z), c, self.family._moment_domain)
        return self.family._to_natural(moments), there_is_one

    def _natural(self, z: Output) -> Natural:
        return z if self.chart is None else self.chart(z)

    def _pull(self, z: Output) -> Callable[[Natural], Output]:
        assert self.chart is not None
        _, pull = jax.vjp(self.chart, z)
        return lambda cotangent: pull(cotangent)[0]


def moved(
    start: PyTree, c: PyTree, domain: Callable[[PyTree], Iterable[Requirement]]
) -> tuple[PyTree, Bool[Array, ""]]:
    """The coordinates `start - c` and whether they are those of a distribution; those at the start if not."""
    end = _tree.subtract(start, c)
    is_inside = are_met([all_finite(end), *domain(end)])
    return jax.tree.map(lambda new, old: jnp.where(is_inside, new, old), end, start), is_inside
