"""What a geometry on the output of a model is, and how geometries combine."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from natgrad import _linalg, _tree
from natgrad._backend import require_sound
from natgrad._check import Requirement, is_concrete, real_array, require
from natgrad._types import Key, Matrix, Output, Scalar


class AbstractGeometry(eqx.Module):
    r"""A dissimilarity $\rho$ between two outputs of a model, and the metric that it gives to small changes.

    The metric is $G_z = \nabla^2_z\,\rho(z, z_0)|_{z = z_0}$.

    A geometry is written for the output of one example, an array of any shape or a pytree; the library maps it over
    the batch. `2.0 * geometry` measures everything twice as far.

    Arithmetic is in single precision at least; what is a vector or a cotangent comes back in the dtype of `z`.
    Values are checked where they are concrete. Under `jit` nothing is checked here: metrics and optimisers report
    through their results instead.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng


    class Weighted(ng.AbstractGeometry):
        # Half the squared distance, with a weight.

        a: float = 4.0

        def _dissimilarity(self, z, z0):
            return self.a * jnp.sum((z - z0) ** 2) / 2

        def _metric_mv(self, z, v):
            return self.a * v

        def _factor(self, z):
            return self.a**0.5 * jnp.eye(z.size, dtype=z.dtype).reshape(-1, *z.shape)

        def _sample(self, z, key):
            return self.a**0.5 * jax.random.normal(key, z.shape, z.dtype)


    assert jnp.allclose(Weighted().metric_matrix(jnp.zeros(2)), 4 * jnp.eye(2))
    ```
    """

    # The private face: what a geometry states ----------------------------------------------------------

    @abstractmethod
    def _dissimilarity(self, z: Output, z0: Output) -> Scalar: ...

    @abstractmethod
    def _metric_mv(self, z: Output, v: Output) -> Output: ...

    @abstractmethod
    def _factor(self, z: Output) -> Output: ...

    @abstractmethod
    def _sample(self, z: Output, key: Key) -> Output: ...

    def _check(self, z: Output, label: str) -> None:
        """Refuse a concrete `z` at which this geometry is not defined, in a message that begins with `label`."""
        del z, label

    def _contains(self, z: Output) -> Bool[Array, ""]:
        """Whether this geometry is defined at `z`."""
        del z
        return jnp.array(True)

    def _tangent(self, v: Output) -> Output:
        """The part of a change that stays where this geometry is defined, if that is an affine space."""
        return v

    def _mirrored(self, z: Output, c: Output) -> tuple[Output, Bool[Array, ""]] | None:
        r"""The point $u$ with $\nabla\phi(u) = \nabla\phi(z) - c$, where the dissimilarity is the Bregman divergence of
        some $\phi$ whose gradient has an inverse in closed form; and whether there is one, `z` standing in for it if
        not."""
        del z, c
        return None

    # The public face -----------------------------------------------------------------------------------

    def dissimilarity(self, z: Output, z0: Output) -> Scalar:
        r"""$\rho(z, z_0) \ge 0$, zero where the outputs agree. Need not be symmetric."""
        z, z0 = self._output(z, "dissimilarity"), self._output(z0, "dissimilarity", "z0")
        self._same(z, z0, "dissimilarity", "z0")
        return self._dissimilarity(*_tree.promote(_tree.at_least_float32(z), _tree.at_least_float32(z0)))

    def metric_mv(self, z: Output, v: Output) -> Output:
        r"""The product $G_z v$: takes a tangent vector to a cotangent."""
        z, v = self._output(z, "metric_mv"), as_output(v, f"`{type(self).__name__}.metric_mv`", "v")
        self._same(z, v, "metric_mv", "v")
        wide = _tree.at_least_float32(z)
        return _tree.cast_like(self._metric_mv(wide, _tree.cast_like(v, wide)), z)

    def metric_matrix(self, z: Output) -> Matrix:
        r"""$G_z$ as a dense matrix over the flattened output, in the order of `ravel_pytree`."""
        z = _tree.at_least_float32(self._output(z, "metric_matrix"))
        return _linalg.dense(lambda v: self._metric_mv(z, v), z)

    def factor(self, z: Output) -> Output:
        r"""Columns $S$ with $S S^\top = G_z$: like `z`, with a new leading axis over columns. As few columns as
        the geometry allows; each is an output cotangent."""
        z = self._output(z, "factor")
        return _tree.cast_like(self._factor(_tree.at_least_float32(z)), z)

    def sample(self, z: Output, key: Key) -> Output:
        r"""A random output cotangent with mean zero and covariance $G_z$."""
        z = self._output(z, "sample")
        return _tree.cast_like(self._sample(_tree.at_least_float32(z), key), z)

    def __mul__(self, scale: Any) -> "AbstractGeometry":
        return Scaled(self, scale)

    __rmul__ = __mul__

    def _output(self, z: Output, method: str, name: str = "z") -> Output:
        require_sound()
        label = f"`{type(self).__name__}.{method}`"
        z = as_output(z, label, name)
        self._check(_tree.at_least_float32(z), label)
        return z

    def _same(self, z: Output, other: Output, method: str, name: str) -> None:
        described = [jax.tree.map(jnp.shape, tree) for tree in (z, other)]
        if described[0] != described[1]:
            raise ValueError(
                f"`{type(self).__name__}.{method}`: `{name}` must have the structure and shapes of `z`, "
                f"{described[0]}, but has {described[1]}. A geometry takes one example at a time: map over a batch "
                "with `jax.vmap`."
            )


class Scaled(AbstractGeometry):
    r"""A geometry times a positive number $c$: dissimilarity $c\,\rho$ and metric $c\,G_z$. Write `c * geometry`."""

    geometry: AbstractGeometry
    scale: Float[Array, ""]

    def __init__(self, geometry: AbstractGeometry, scale: Any):
        label = "Scaling a geometry"
        scale = real_array(scale, label)
        if scale.ndim:
            raise ValueError(f"{label} takes one number, but got an array of shape {scale.shape}.")
        positive = Requirement(scale > 0, "a positive number", "Leave the geometry out to switch it off.")
        self.geometry = geometry
        self.scale = require(scale, [positive], label, traced=False)

    def _dissimilarity(self, z, z0):
        rho = self.geometry._dissimilarity(z, z0)
        return self.scale.astype(rho.dtype) * rho

    def _metric_mv(self, z, v):
        return _tree.scale(self.scale, self.geometry._metric_mv(z, v))

    def _factor(self, z):
        return _tree.scale(jnp.sqrt(self.scale), self.geometry._factor(z))

    def _sample(self, z, key):
        return _tree.scale(jnp.sqrt(self.scale), self.geometry._sample(z, key))

    def _check(self, z, label):
        self.geometry._check(z, label)

    def _contains(self, z):
        return self.geometry._contains(z)

    def _tangent(self, v):
        return self.geometry._tangent(v)

    def _mirrored(self, z, c):
        return self.geometry._mirrored(z, _tree.scale(1 / self.scale, c))


def as_output(z: Any, method: str, name: str) -> Output:
    """`z` as a pytree of real floating-point arrays, half precision included."""
    leaves, structure = jax.tree.flatten(z)
    if not leaves:
        raise ValueError(f"{method}: `{name}` has no arrays, so there is nothing to measure.")
    halves = (jnp.float16, jnp.bfloat16)
    return jax.tree.unflatten(
        structure,
        [
            leaf if getattr(leaf, "dtype", None) in halves else real_array(leaf, f"{method}: `{name}`")
            for leaf in leaves
        ],
    )


def gaussian_sample(factor: Output, key: Key) -> Output:
    r"""$S\epsilon$ with $\epsilon$ standard normal: mean zero, covariance $S S^\top$."""
    first = jax.tree.leaves(factor)[0]
    noise = jax.random.normal(key, first.shape[:1], first.dtype)
    return jax.tree.map(lambda columns: jnp.tensordot(noise.astype(columns.dtype), columns, axes=1), factor)


Function = Callable[[Output], Scalar]


def hessian_mv(function: Function, z: Output, v: Output) -> Output:
    return jax.jvp(jax.grad(function), (z,), (v,))[1]


def hessian_factor(function: Function, z: Output) -> Output:
    matrix = _linalg.dense(lambda v: hessian_mv(function, z, v), z)
    return jax.vmap(_tree.unravel_like(z))(_linalg.square_root(matrix).T)


def check_semidefinite(function: Function, z: Output, label: str, needs: str, remedy: str) -> None:
    """Refuse a concrete `z` where the Hessian has a negative eigenvalue, or is not finite."""
    if not is_concrete(z):
        return
    factor = hessian_factor(function, z)
    finite = jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(factor)]))
    require(z, [Requirement(finite, needs, remedy)], label)
