from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp

from natgrad import _tree
from natgrad._check import Requirement, is_concrete, require
from natgrad._geometry.base import AbstractGeometry, check_semidefinite, gaussian_sample, hessian_factor, hessian_mv
from natgrad._types import Output, Scalar


class Dissimilarity(AbstractGeometry):
    r"""Any smooth function $\rho(z, z_0)$ that is least, with zero gradient, where its arguments agree.

    $G_z$ is its Hessian in the first argument there, by automatic differentiation.

    At a concrete output the gradient at coincidence and the sign of the Hessian are checked. Write squares, not
    norms: a norm has no derivative at zero.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    geometry = ng.Dissimilarity(lambda z, z0: 1 - jnp.cos(z - z0))  # for angles
    assert jnp.allclose(geometry.metric_mv(jnp.array(0.3), jnp.array(1.0)), 1.0)
    ```
    """

    rho: Callable[[Output, Output], Scalar] = eqx.field(converter=_tree.as_callable)

    def _dissimilarity(self, z, z0):
        return self.rho(z, z0)

    def _metric_mv(self, z, v):
        return hessian_mv(self._from(z), z, v)

    def _factor(self, z):
        return hessian_factor(self._from(z), z)

    def _sample(self, z, key):
        return gaussian_sample(self._factor(z), key)

    def _check(self, z, label):
        if not is_concrete(z):
            return
        gradient = jax.grad(self._from(z))(z)

        def size(tree):
            return jnp.max(jnp.stack([jnp.max(jnp.abs(leaf), initial=0.0) for leaf in jax.tree.leaves(tree)]))

        slack = jnp.sqrt(jnp.finfo(jax.tree.leaves(z)[0].dtype).eps) * (1 + size(z))
        flat = Requirement(
            size(gradient) <= slack,
            "`rho(z, z0)` to have zero gradient where `z = z0`",
            "Use a function that is least there, such as a squared distance rather than a distance.",
        )
        require(gradient, [flat], label)
        check_semidefinite(
            self._from(z),
            z,
            label,
            "`rho(z, z0)` to have a minimum where `z = z0` (its Hessian positive semidefinite)",
            "Check its sign.",
        )

    def _from(self, z0: Output) -> Callable[[Output], Scalar]:
        return lambda z: self.rho(z, z0)
