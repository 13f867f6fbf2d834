import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._geometry.base import AbstractGeometry


class ProductGeometry(AbstractGeometry):
    """Several outputs, each with its own geometry: dissimilarities add, and the metric is block diagonal.

    `geometries` is any pytree (a dictionary of heads, a tuple); the output is a tree with the same structure.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    geometry = ng.ProductGeometry({"label": ng.Fisher(ng.Bernoulli()), "place": ng.Euclidean()})
    z = {"label": jnp.array(0.0), "place": jnp.ones(2)}
    pushed = geometry.metric_mv(z, {"label": jnp.array(1.0), "place": jnp.ones(2)})
    assert jnp.allclose(pushed["label"], 0.25) and jnp.allclose(pushed["place"], 1.0)
    ```
    """

    geometries: PyTree

    def __check_init__(self):
        parts = jax.tree.leaves(self.geometries, is_leaf=is_geometry)
        if not parts or not all(is_geometry(part) for part in parts):
            raise TypeError(
                "`ProductGeometry` needs a pytree with a geometry at every leaf, such as `{'mean': Euclidean()}`."
            )

    def _dissimilarity(self, z, z0):
        parts = self._call("_dissimilarity", z, z0)
        return _tree.vdot(parts, [jnp.ones_like(part) for part in parts])

    def _metric_mv(self, z, v):
        return self._unflatten(self._call("_metric_mv", z, v))

    def _factor(self, z):
        return self._unflatten(_tree.block_columns(self._call("_factor", z)))

    def _sample(self, z, key):
        keys = self._unflatten(list(jax.random.split(key, len(self._parts))))
        return self._unflatten(self._call("_sample", z, keys))

    def _check(self, z, label):
        for geometry, part in zip(self._parts, self._split(z), strict=True):
            geometry._check(part, label)

    def _contains(self, z):
        return jnp.all(jnp.stack(self._call("_contains", z)))

    def _tangent(self, v):
        return self._unflatten(self._call("_tangent", v))

    def _mirrored(self, z, c):
        parts = self._call("_mirrored", z, c)
        if any(part is None for part in parts):
            return None
        points, are_there = zip(*parts, strict=True)
        return self._unflatten(points), jnp.all(jnp.stack(are_there))

    @property
    def _parts(self) -> list[AbstractGeometry]:
        return jax.tree.leaves(self.geometries, is_leaf=is_geometry)

    @property
    def _structure(self):
        return jax.tree.structure(self.geometries, is_leaf=is_geometry)

    def _split(self, z):
        try:
            return self._structure.flatten_up_to(z)
        except (ValueError, TypeError) as error:
            raise TypeError(
                f"The output must have the structure of `ProductGeometry.geometries`, but {error}."
            ) from error

    def _unflatten(self, parts):
        return jax.tree.unflatten(self._structure, parts)

    def _call(self, method, *trees):
        splits = [self._split(tree) for tree in trees]
        return [getattr(geometry, method)(*args) for geometry, *args in zip(self._parts, *splits, strict=True)]


def is_geometry(x) -> bool:
    return isinstance(x, AbstractGeometry)
