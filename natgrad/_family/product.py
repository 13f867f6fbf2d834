from typing import Any

import jax
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._family.base import AbstractFamily


class Product(AbstractFamily):
    """Independent observations of several families, held in any pytree (a tuple, a dictionary of heads).

    Parameters, moments and observations are trees of the same structure.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    family = ng.Product({"count": ng.Poisson(), "flag": ng.Bernoulli()})
    eta = {"count": jnp.log(3.0), "flag": jnp.array(0.0)}
    moments = family.to_moments(eta)
    assert jnp.allclose(moments["count"], 3.0) and jnp.allclose(moments["flag"], 0.5)
    ```
    """

    families: PyTree

    def __check_init__(self):
        parts = jax.tree.leaves(self.families, is_leaf=is_family)
        if not parts or not all(is_family(part) for part in parts):
            raise TypeError("`Product` needs a pytree with a family at every leaf, such as `(Bernoulli(), Poisson())`.")

    @property
    def moves_samples(self):
        return all(part.moves_samples for part in jax.tree.leaves(self.families, is_leaf=is_family))

    @property
    def _event_shapes(self):
        raise AssertionError("unreachable: a product asks its parts for their shapes")

    def _log_partition(self, eta):
        return self._sum("_log_partition", eta)

    def _statistics(self, x):
        return self._map("_statistics", x)

    def _tangent_moments(self, v):
        return self._map("_tangent_moments", v)

    def _draw(self, eta, key):
        return self._map("_draw", eta, self._keys(key))

    def _natural_domain(self, eta):
        return self._collect("_natural_domain", eta)

    def _moment_domain(self, xi):
        return self._collect("_moment_domain", xi)

    def _support(self, x):
        return self._collect("_support", x)

    def _target_domain(self, x):
        return self._collect("_target_domain", x)

    def _target(self, eta, y):
        splits = self._split(eta), self._split(y, "The target of `Product`")
        return self._unflatten([f._target(*pair) for f, *pair in zip(self._parts, *splits, strict=True)])

    def _log_base_measure(self, x):
        return self._sum("_log_base_measure", x)

    def _mean_log_base_measure(self, eta):
        return self._sum("_mean_log_base_measure", eta)

    def _to_moments(self, eta):
        return self._map("_to_moments", eta)

    def _to_natural(self, xi):
        return self._map("_to_natural", xi)

    def _fisher_mv(self, eta, v):
        return self._map("_fisher_mv", eta, v)

    def _fisher_factor(self, eta):
        return self._unflatten(_tree.block_columns(self._call("_fisher_factor", eta)))

    def _log_prob(self, eta, x):
        return self._sum("_log_prob", eta, x)

    def _score(self, eta, x):
        return self._map("_score", eta, x)

    def _draw_score(self, eta, key):
        return self._map("_draw_score", eta, self._keys(key))

    def _kl(self, eta1, eta2):
        return self._sum("_kl", eta1, eta2)

    def _entropy(self, eta):
        return self._sum("_entropy", eta)

    def _arrays(self, value, label):
        parts = self._split(value, label)
        arrays = [f._arrays(part, label) for f, part in zip(self._parts, parts, strict=True)]
        return self._unflatten(_tree.promote(*arrays))

    def _observed(self, x, label, dtype):
        parts = self._split(x, label)
        return self._unflatten([f._observed(part, label, dtype) for f, part in zip(self._parts, parts, strict=True)])

    def _observation_shape(self, eta):
        return self._map("_observation_shape", eta)

    def _sized(self, eta):
        return Product(self._map("_sized", eta))

    @property
    def _parts(self) -> list[AbstractFamily]:
        return jax.tree.leaves(self.families, is_leaf=is_family)

    def _split(self, value, label="`Product`: a parameter"):
        try:
            return jax.tree.structure(self.families, is_leaf=is_family).flatten_up_to(value)
        except (ValueError, TypeError) as error:
            raise TypeError(
                f"{label} must have the structure of `Product.families`, but {str(error).rstrip('.')}."
            ) from error

    def _unflatten(self, parts):
        return jax.tree.unflatten(jax.tree.structure(self.families, is_leaf=is_family), parts)

    def _call(self, method, *trees):
        splits = [self._split(tree) for tree in trees]
        return [getattr(f, method)(*args) for f, *args in zip(self._parts, *splits, strict=True)]

    def _map(self, method, *trees):
        return self._unflatten(self._call(method, *trees))

    def _sum(self, method, *trees) -> Any:
        return sum(self._call(method, *trees))

    def _collect(self, method, tree):
        return [requirement for requirements in self._call(method, tree) for requirement in requirements]

    def _keys(self, key):
        return self._unflatten(list(jax.random.split(key, len(self._parts))))


def is_family(x) -> bool:
    return isinstance(x, AbstractFamily)
