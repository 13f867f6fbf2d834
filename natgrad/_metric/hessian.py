from collections.abc import Callable

import equinox as eqx
import jax
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._check import caller, public
from natgrad._metric.base import AbstractMetric
from natgrad._model import check_params
from natgrad._types import Key


class HessianMetric(AbstractMetric):
    r"""The Hessian $\nabla^2 J(w)$ of a cost, matrix-free. The gradient is differentiated once and products reuse that.

    Symmetric but in general indefinite, so it is not a metric in the strict sense: it multiplies and can be solved
    with, solvers report negative curvature, and it has no sampler and no root."""

    product: Callable
    _structure: tuple = eqx.field(static=True)

    def _mv(self, v):
        return self.product(v)

    @property
    def is_semidefinite(self):
        return False

    def _sample(self, key: Key):
        raise TypeError(
            "A Hessian is not a covariance, since it may be indefinite, and cannot be sampled. Use `gauss_newton` or "
            "`pullback` for a metric that can."
        )

    def in_structure(self):
        leaves, treedef = self._structure
        return jax.tree.unflatten(treedef, leaves)


@public
def hessian(cost: Callable, params: PyTree, *data: PyTree) -> HessianMetric:
    r"""The Hessian of `cost(params, *data)`, a number, at `params`.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    metric = ng.hessian(lambda w: w[0] ** 2 * w[1], jnp.array([1.0, 3.0]))
    assert jnp.allclose(metric.as_matrix(), jnp.array([[6.0, 2.0], [2.0, 0.0]]))
    ```
    """
    check_params(params)
    shape = jax.eval_shape(cost, params, *data)
    if jax.tree.structure(shape) != jax.tree.structure(0) or shape.shape != ():
        raise TypeError(f"{caller()} needs a `cost` that returns one number, but it returns {shape}.")
    _, product = jax.linearize(jax.grad(lambda w: cost(w, *data)), params)
    leaves, treedef = jax.tree.flatten(_tree.structure(params))
    return HessianMetric(product, (tuple(leaves), treedef))
