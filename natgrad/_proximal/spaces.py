r"""The proximal problem $\min_u J(u) + \mu\,\rho(u, w)$, and the spaces in which $\rho$ is measured."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from natgrad import _tree
from natgrad._check import Requirement, caller, public, real_array, require
from natgrad._geometry.base import AbstractGeometry
from natgrad._geometry.dissimilarity import Dissimilarity
from natgrad._metric.base import AbstractMetric
from natgrad._metric.pullback import function_distance, pullback
from natgrad._model import check_params, without_aux
from natgrad._point.batch import Batch
from natgrad._point.point import OutputMap
from natgrad._types import Scalar


class FunctionSpace(eqx.Module):
    r"""Parameters measured by their outputs: $\rho(u, w) = \frac1N\sum_i \rho(f(u, x_i), f(w, x_i))$ in a geometry.

    **Arguments:**

    - `model`: `model(params, x) -> z`, or `model(params) -> z` with `x=None`.
    - `geometry`: a geometry of the output of one example.
    - `x`: inputs with the examples along the leading axis; default `None`.
    - `has_aux`: whether the model returns `(z, aux)`, of which `aux` is ignored; default `False`.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    space = ng.FunctionSpace(lambda w, x: x @ w, ng.Euclidean(), jnp.eye(3))
    problem = ng.ProximalProblem(lambda w: jnp.sum((w - 1) ** 2), space, strength=2.0)
    ```
    """

    model: Callable = eqx.field(converter=_tree.as_callable)
    geometry: Any
    x: PyTree = None
    has_aux: bool = eqx.field(default=False, static=True)

    @public
    def __check_init__(self):
        if not isinstance(self.geometry, AbstractGeometry):
            name = getattr(self.geometry, "__name__", type(self.geometry).__name__)
            raise TypeError(f"{caller()} needs a geometry, such as `Euclidean()`, but got `{name}`.")

    @public
    def dissimilarity(self, other: PyTree, params: PyTree) -> Scalar:
        """The mean dissimilarity between the outputs of `other` and of `params`."""
        return function_distance(self.model, self.geometry, params, other, self.x, has_aux=self.has_aux)

    @public
    def metric(self, params: PyTree) -> AbstractMetric:
        """The pullback metric, the Hessian of the dissimilarity where both arguments agree."""
        return pullback(self.model, self.geometry, params, self.x, has_aux=self.has_aux, check=False)

    def contains(self, params: PyTree) -> Bool[Array, ""]:
        """Whether the geometry is defined at all outputs."""
        z = OutputMap(without_aux(self.model, self.has_aux), Batch(self.x))(params)
        return jnp.all(jax.vmap(self.geometry._contains)(z))

    def tangent(self, v: PyTree) -> PyTree:
        """A change of the parameters, projected to where the geometry is defined."""
        return v

    def mirror(self, params: PyTree, c: PyTree) -> tuple[PyTree, Bool[Array, ""]] | None:
        """The point after moving against `c` in the dual coordinates, and whether it exists; `None` without a closed
        form."""
        del params, c
        return None


class ParameterSpace(eqx.Module):
    """A geometry on the parameters themselves."""

    geometry: AbstractGeometry

    def dissimilarity(self, other: PyTree, params: PyTree) -> Scalar:
        return self.geometry.dissimilarity(other, params)

    def metric(self, params: PyTree) -> AbstractMetric:
        return pullback(_identity, self.geometry, params, check=False)

    def contains(self, params: PyTree) -> Bool[Array, ""]:
        return self.geometry._contains(params)

    def tangent(self, v: PyTree) -> PyTree:
        return self.geometry._tangent(v)

    def mirror(self, params: PyTree, c: PyTree) -> tuple[PyTree, Bool[Array, ""]] | None:
        return self.geometry._mirrored(params, c)


def _identity(params: PyTree) -> PyTree:
    return params


class ProximalProblem(eqx.Module):
    r"""Minimise $J(u) + \mu\,\rho(u, w)$ over $u$: lower a cost without moving far from $w$.

    The steps take $w$ and solve the problem or an approximation:

    | step | cost | dissimilarity |
    |---|---|---|
    | `proximal_point` | exact | exact |
    | `mirror_step` | linear at $w$ | exact |
    | `natural_step` | linear at $w$ | quadratic at $w$ |
    | `damped_newton_step` | quadratic at $w$ | quadratic at $w$ |
    | `trust_region_step` | exact | at most a radius |

    **Arguments:**

    - `cost`: $J$, a function of the parameters.
    - `dissimilarity`: $\rho$, as a geometry of the parameters (`Euclidean()`; `Fisher(family)` if they are natural
      parameters and `DualFisher(family)` if they are moments; `Bregman(phi)`), as `FunctionSpace(model, geometry, x)`,
      or as a function `rho(u, w)`.
    - `strength`: $\mu > 0$, by default 1.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    problem = ng.ProximalProblem(lambda w: jnp.sum(w**2), ng.Euclidean(), strength=2.0)
    ng.proximal_point(problem, jnp.ones(2)).value  # 1/2 in both entries
    ```
    """

    cost: Callable[[PyTree], Scalar]
    space: FunctionSpace | ParameterSpace
    strength: Scalar

    @public
    def __init__(self, cost: Any, dissimilarity: Any, strength: Any = 1.0):
        if not callable(cost):
            raise TypeError(f"{caller()} needs a `cost` that is a function, but got `{type(cost).__name__}`.")
        strength = real_array(strength, f"{caller()}: `strength`")
        if strength.ndim:
            raise ValueError(f"{caller()} needs one number for `strength`, but got an array of shape {strength.shape}.")
        positive = Requirement(strength > 0, "a `strength` above 0", "To minimise the cost alone, use an optimiser.")
        self.cost = _tree.as_callable(cost)
        self.space = _as_space(dissimilarity)
        self.strength = require(strength, [positive])

    def gradient(self, w: PyTree) -> PyTree:
        r"""$\nabla J(w)$."""
        return jax.grad(self.cost)(w)

    @public
    def check(self, w: PyTree) -> None:
        """Refuse a point that is not a tree of arrays, or at which cost or geometry are not defined."""
        check_params(w)
        shape = jax.eval_shape(self.cost, w)
        is_number = jax.tree.structure(shape) == jax.tree.structure(0) and shape.shape == ()
        if not is_number or not jnp.issubdtype(shape.dtype, jnp.floating):
            raise TypeError(f"{caller()} needs a `cost` that returns one real number, but it returns {shape}.")
        # Raises if the outputs have no axis of examples.
        jax.eval_shape(self.space.dissimilarity, w, w)
        inside = Requirement(
            self.space.contains(w), "a point at which the geometry is defined", "Start inside its domain."
        )
        require(w, [inside], traced=False)


def _as_space(dissimilarity: Any) -> FunctionSpace | ParameterSpace:
    if isinstance(dissimilarity, FunctionSpace | ParameterSpace):
        return dissimilarity
    if isinstance(dissimilarity, AbstractGeometry):
        return ParameterSpace(dissimilarity)
    if callable(dissimilarity) and not isinstance(dissimilarity, type):
        return ParameterSpace(Dissimilarity(dissimilarity))
    raise TypeError(
        f"{caller()} needs a dissimilarity: a geometry such as `Euclidean()`, `FunctionSpace(model, geometry, x)`, or "
        f"a function `rho(u, w)`; but got `{getattr(dissimilarity, '__name__', type(dissimilarity).__name__)}`."
    )
