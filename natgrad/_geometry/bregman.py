from collections.abc import Callable

import equinox as eqx
import jax
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._geometry.base import AbstractGeometry, check_semidefinite, gaussian_sample, hessian_factor, hessian_mv
from natgrad._types import Output, Scalar


class Bregman(AbstractGeometry):
    r"""The Bregman divergence of a convex function $\phi$ of the output, with $G_z = \nabla^2\phi(z)$.

    $\rho(z, z_0) = \phi(z) - \phi(z_0) - \langle\nabla\phi(z_0), z - z_0\rangle$.

    Non-negative; zero only where the outputs agree if $\phi$ is strictly convex, and otherwise also along the
    directions in which it is flat (adding a constant to all logits, for `logsumexp`). Where $\phi$ turns out not
    to be convex at a concrete output, an error says so.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    geometry = ng.Bregman(lambda z: jnp.sum(z * jnp.log(z)))
    assert jnp.allclose(geometry.metric_matrix(jnp.array([0.5, 2.0])), jnp.diag(jnp.array([2.0, 0.5])))
    ```
    """

    phi: Callable[[Output], Scalar] = eqx.field(converter=_tree.as_callable)

    def _dissimilarity(self, z, z0):
        value, gradient = jax.value_and_grad(self.phi)(z0)
        return self.phi(z) - value - _tree.vdot(gradient, _tree.subtract(z, z0))

    def _metric_mv(self, z, v):
        return hessian_mv(self.phi, z, v)

    def _factor(self, z):
        return hessian_factor(self.phi, z)

    def _sample(self, z, key):
        return gaussian_sample(self._factor(z), key)

    def _check(self, z, label):
        check_semidefinite(
            self.phi,
            z,
            label,
            "`phi` to be convex at `z` (its Hessian positive semidefinite)",
            "Check its sign, and that `z` lies where it is convex.",
        )


class LossGeometry(eqx.Module):
    """The geometry of every example's own loss, as a function of the output."""

    loss: Callable = eqx.field(converter=_tree.as_callable)

    def at(self, target: PyTree) -> Bregman:
        return Bregman(lambda z: self.loss(z, target))
