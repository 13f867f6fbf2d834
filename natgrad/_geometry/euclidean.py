import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from natgrad import _tree
from natgrad._geometry.base import AbstractGeometry


class Euclidean(AbstractGeometry):
    r"""Half the squared Euclidean distance $\frac12\|z - z_0\|^2$, with the identity for a metric.

    Pulled back through a model it gives the Gauss-Newton matrix of least squares.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    geometry = ng.Euclidean()
    assert jnp.allclose(geometry.dissimilarity(jnp.array([3.0, 4.0]), jnp.zeros(2)), 12.5)
    ```
    """

    def _dissimilarity(self, z, z0):
        step = _tree.subtract(z, z0)
        return _tree.vdot(step, step) / 2

    def _metric_mv(self, z, v):
        del z
        return v

    def _factor(self, z):
        flat, unravel = ravel_pytree(z)
        return jax.vmap(unravel)(jnp.eye(flat.size, dtype=flat.dtype))

    def _sample(self, z, key):
        flat, unravel = ravel_pytree(z)
        return unravel(jax.random.normal(key, flat.shape, flat.dtype))

    def _mirrored(self, z, c):
        return _tree.subtract(z, c), jnp.array(True)
