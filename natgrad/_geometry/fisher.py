"""The Fisher metric of an exponential family, in natural parameters and in moments."""

from collections.abc import Callable, Iterable

import equinox as eqx
import jax
from jaxtyping import Array, Bool, PyTree

from natgrad import _linalg, _tree
from natgrad._check import Requirement, are_met, require
from natgrad._family.base import AbstractFamily, all_finite
from natgrad._geometry.base import AbstractGeometry, gaussian_sample
from natgrad._types import Natural, Output


class Fisher(AbstractGeometry):
    r"""The Kullback-Leibler divergence of an exponential family, with its Fisher information for a metric.

    Outputs are the natural parameters of the family, and then
    `dissimilarity(z, z0)` $= \mathrm{KL}(p_{z_0}, p_z)$, the Bregman divergence of $\log Z$, with
    $G_z = \nabla^2\log Z(z)$.

    If the model puts out something else, such as a scale or a rate, `chart` maps one output $z$ to natural
    parameters $\eta(z)$, and $G_z = (\partial\eta/\partial z)^\top F\,(\partial\eta/\partial z)$. The Fisher metric
    is then no longer the Hessian of the loss: it drops the curvature of the chart.

    `sample` draws an observation from the model and returns its score.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    rates = jnp.array([0.5, 4.0])
    geometry = ng.Fisher(ng.Poisson())
    assert jnp.allclose(geometry.metric_matrix(jnp.log(rates)), jnp.diag(rates))
    of_rates = ng.Fisher(ng.Poisson(), chart=jnp.log)
    assert jnp.allclose(of_rates.metric_matrix(rates), jnp.diag(1 / rates))
    ```
    """

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

    def _check(self, z, label):
        name = "z" if self.chart is None else "chart(z)"
        label = f"{label}: natural parameter `{name}` of `{type(self.family).__name__}`"
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
    return _tree.where(is_inside, end, start), is_inside


class DualFisher(AbstractGeometry):
    r"""The Kullback-Leibler divergence of an exponential family whose outputs are moments.

    `dissimilarity(z, z0)` is $\mathrm{KL}(p_z, p_{z_0})$, the Bregman divergence of the Legendre dual of $\log Z$, with
    $G_z = \partial\eta/\partial\xi$, the inverse of the Fisher information.

    Mind the order: it is the other one of the two divergences that `Fisher` measures in natural parameters. Where
    moments are bound to each other, as those of `Categorical`, which add up to one, the metric is the
    pseudo-inverse.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    geometry = ng.DualFisher(ng.Poisson())
    assert jnp.allclose(geometry.metric_matrix(jnp.array(4.0)), 0.25)  # outputs are rates, which are known to 1/rate
    ```
    """

    family: AbstractFamily

    def _dissimilarity(self, z, z0):
        return self.family._kl(self.family._to_natural(z), self.family._to_natural(z0))

    def _metric_mv(self, z, v):
        return self._tangent(jax.jvp(self.family._to_natural, (z,), (self._tangent(v),))[1])

    def _factor(self, z):
        matrix = _linalg.dense(lambda v: self._metric_mv(z, v), z)
        return jax.vmap(_tree.unravel_like(z))(_linalg.square_root((matrix + matrix.T) / 2).T)

    def _sample(self, z, key):
        return gaussian_sample(self._factor(z), key)

    def _check(self, z, label):
        label = f"{label}: moment `z` of `{type(self.family).__name__}`"
        xi = self.family._arrays(z, label)
        require(xi, [all_finite(xi), *self.family._moment_domain(xi)], label, traced=False)

    def _contains(self, z):
        return are_met([all_finite(z), *self.family._moment_domain(z)])

    def _tangent(self, v):
        return self.family._tangent_moments(v)

    def _mirrored(self, z, c):
        """Natural parameters move against the gradient in moments."""
        natural, there_is_one = moved(self.family._to_natural(z), c, self.family._natural_domain)
        return self.family._to_moments(natural), there_is_one
