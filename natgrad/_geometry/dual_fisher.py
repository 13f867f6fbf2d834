import jax

from natgrad import _linalg, _tree
from natgrad._check import are_met, require
from natgrad._family.base import AbstractFamily, all_finite
from natgrad._geometry.base import AbstractGeometry, gaussian_sample
from natgrad._geometry.fisher import moved


class DualFisher(AbstractGeometry):
    r"""The Kullback-Leibler divergence of an exponential family in its other coordinates: outputs are moments, and
    `dissimilarity(z, z0)` $= \mathrm{KL}(p_z, p_{z_0})$, the Bregman divergence of the Legendre dual of $\log Z$, with
    $G_z = \partial\eta/\partial\xi$, the inverse of the Fisher information.

    Mind the order: it is the other one of the two divergences that `Fisher` measures in natural parameters. Where
    moments are bound to each other, as those of `Categorical`, which add up to one, the metric is the
    pseudo-inverse."""

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

    def _check(self, z, method):
        label = f"`DualFisher.{method}` of `{type(self.family).__name__}`: moment `z`"
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
