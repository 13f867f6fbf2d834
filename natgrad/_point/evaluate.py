"""From the arguments of a public function to a model at a point."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._check import caller, is_concrete, public, require
from natgrad._compile import compiled
from natgrad._geometry.base import AbstractGeometry
from natgrad._geometry.bregman import LossGeometry
from natgrad._model import check_params, finite, without_aux
from natgrad._point.batch import (
    Batch,
    Weights,
    as_examples,
    check_weights,
    largest_of_examples,
    refuse_mask,
    refuse_weights,
    weigh,
)
from natgrad._point.per_example import PerExample
from natgrad._point.point import OutputMap, Point
from natgrad._point.probe import check_model
from natgrad._point.records import MemoryBudget
from natgrad._types import Output


class PendingPoint(eqx.Module):
    """A point whose forward pass has not run yet: the compiled function that uses the point runs it."""

    map: OutputMap
    params: PyTree
    # Whether the compiled function has to test that the model treats examples independently.
    check: bool = eqx.field(default=False, static=True)

    def point(self) -> Point:
        return self.map.with_sites(self.params, check=self.check)


# A point, whether its forward pass has run or not.
AnyPoint = PendingPoint | Point


def as_point(
    model: Any,
    geometry: AbstractGeometry | None,
    params: PyTree,
    x: PyTree,
    *,
    has_aux: bool = False,
    check: bool = True,
    budget: int = 2**26,
) -> AnyPoint:
    """Check the arguments of a public function; return the point that was passed, or a pending one."""
    if isinstance(model, Point):
        return given_point(model, geometry, params, x, has_aux=has_aux)
    if budget < 1:
        raise ValueError(f"{caller()} needs a `budget` of at least one byte, but got {budget}.")
    check_params(params)
    model, batch = without_aux(model, has_aux), as_examples(x)
    is_left = check and check_model(model, params, batch)
    return PendingPoint(OutputMap(model, batch, geometry, MemoryBudget(budget)), params, is_left)


def given_point(point: Point, *others: Any, has_aux: bool = False) -> Point:
    """A point, if nothing is given beside it."""
    if has_aux or any(other is not None for other in others):
        raise TypeError(
            f"{caller()} got a `Point` and more arguments. A point already has its model, geometry, parameters and "
            "data. Pass everything else by name: `per_example(point, cotangents=...)`, `natural_gradient(point, "
            "gradient=...)`."
        )
    return point


def evaluated(at: AnyPoint) -> Point:
    """The point after its forward pass, with sites."""
    if isinstance(at, PendingPoint):
        return at.point()
    return at if at.sites is not None else at.map.with_sites(at.params)


def geometry_of(at: AnyPoint) -> AbstractGeometry:
    """The geometry of the outputs; an error if there is none."""
    geometry = at.map.geometry
    if not isinstance(geometry, AbstractGeometry):
        raise TypeError(
            f"{caller()} needs a geometry of the outputs, such as `Fisher(Categorical(10))`, but got "
            f"`{type(geometry).__name__}`. Give it as the second argument, also to `evaluate`."
        )
    return geometry


def check_values(point: Point) -> None:
    """Refuse concrete outputs that are not finite, or at which the geometry is not defined."""
    check_outputs_in(point.map.geometry, point.z, point.map.batch)


def check_outputs_in(geometry: AbstractGeometry | LossGeometry | None, z: Output, batch: Batch) -> None:
    """Refuse concrete outputs that are not finite, or at which a geometry is not defined. Outputs of weight zero may be
    anywhere."""
    with jax.ensure_compile_time_eval():
        require(z, [finite(z)], f"{caller()}: the output of the model", traced=False)
        if geometry is None or not is_concrete((z, batch)):
            return

        def at(number):
            return _tree.take((_tree.at_least_float32(z), batch.y), number)

        weights = batch.weights
        heaviest = 0 if weights is None else int(jnp.argmax(largest_of_examples(weights)))
        output, target = at(heaviest)
        if isinstance(geometry, LossGeometry):
            geometry.at(target)._check(output, caller())
        else:
            are_inside = jax.vmap(geometry._contains)(_tree.at_least_float32(z))
            are_counted = jnp.array(True) if weights is None else largest_of_examples(weights) > 0
            are_outside = ~are_inside & are_counted
            if jnp.any(are_outside):
                number = int(jnp.argmax(are_outside))
                geometry._check(at(number)[0], f"{caller()}: example {number}" if number else caller())
        if weights is not None and weights.ndim > 1:
            check_weights(weights, z)
            check_positions(geometry.at(target) if isinstance(geometry, LossGeometry) else geometry, output, weights)


def check_positions(geometry: AbstractGeometry, z: Output, weights: Weights) -> None:
    """Refuse weights of positions that the geometry of an output does not treat one by one, such as its classes."""
    shape = weights.shape[1:]
    # A tangent at one position: a metric that treats positions one by one keeps it there.
    at_first = jnp.zeros(math.prod(shape)).at[0].set(1.0).reshape(shape)
    tangent = weigh(at_first, jax.tree.map(jnp.ones_like, z))
    elsewhere = weigh(1.0 - at_first, geometry.metric_mv(z, tangent))
    if any(jnp.any(leaf != 0) for leaf in jax.tree.leaves(elsewhere)):
        raise ValueError(
            f"{caller()} needs weights of examples or of positions, but got weights of shape {weights.shape} for "
            f"outputs in which `{type(geometry).__name__}` does not treat these axes one by one. Leave out the axis of "
            "classes or of components."
        )


@public
def evaluate(
    model: Callable,
    geometry: AbstractGeometry | None,
    params: PyTree,
    x: PyTree = None,
    *,
    has_aux: bool = False,
    check: bool = True,
    budget: int = 2**26,
) -> Point:
    r"""Run a model once, for several metrics or statistics at the same parameters and data.

    `pullback`, `diagonal`, `kfac`, `ekfac`, `gram`, `natural_gradient` and `per_example` accept the point in place of
    the model, and repeat no forward pass.

    **Arguments:**

    - `model`: `model(params, x) -> z`, with examples along the leading axis of `z`. With `x=None` it is
      `model(params)`, one example.
    - `geometry`: of one example's output; `None` where only `per_example` is wanted.
    - `x`: inputs, or a `Batch` with weights, masks or axes of examples.
    - `has_aux`, `check`, `budget`: as for `per_example`.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0, 0.0], [0.0, 2.0]])
    point = ng.evaluate(lambda w, x: x @ w, ng.Euclidean(), jnp.zeros(2), x)
    kernel, metric = ng.gram(point), ng.pullback(point)
    assert jnp.allclose(jnp.trace(kernel.reshape(2, 2)) / 2, metric.trace())
    ```
    """
    at = as_point(model, geometry, params, x, has_aux=has_aux, check=check, budget=budget)
    point = _compiled_point(at)
    check_values(point)
    return point


# Compiled once for a model and its shapes: points of equal shapes then have one program, and functions that were
# compiled for one of them serve the others.
_compiled_point = compiled(evaluated)


@public
def per_example(
    model: Callable | Point,
    params: PyTree = None,
    x: PyTree = None,
    cotangents: PyTree = None,
    *,
    has_aux: bool = False,
    check: bool = True,
    budget: int = 2**26,
) -> PerExample:
    r"""The gradients $g_i = J_i^\top u_i$ of single examples as a linear map, at the cost of about one gradient.

    **Arguments:**

    - `model`: `model(params, x) -> z`, with examples along the leading axis of `z`. With `x=None` it is
      `model(params)`, one example. Or a `Point`, without `params` and `x`.
    - `cotangents`: $u_i$, like the outputs: for the gradients of a loss, its derivative with respect to `z`. An axis in
      front of all leaves gives several to each example, for which the forward pass is shared. A function
      `z -> cotangents` sees the outputs without a second forward pass.
    - `x`: inputs, with examples along the leading axis; `Batch(x, in_axes=...)` where they are along another one.
    - `has_aux`: whether the model returns `(z, aux)`; `aux` is then left out.
    - `check`: whether to test that the model treats examples independently and that the gradients of examples sum to
      the gradient of the batch. On concrete data this is done once for a model and its shapes, for the cost of a
      gradient. Under `jit` it is read off the program where that is possible, and otherwise costs a forward pass.
    - `budget`: how many bytes may be used at once for what has to be formed for each example.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0, 0.0], [3.0, 4.0]])
    gradients = ng.per_example(lambda w, x: x @ w, jnp.zeros(2), x, jnp.ones(2))
    assert jnp.allclose(gradients.norms(), jnp.array([1.0, 5.0]))
    ```
    """
    at = as_point(model, None, params, x, has_aux=has_aux, check=check, budget=budget)
    point = evaluated(at)
    check_outputs_in(None, point.z, point.map.batch)
    refuse_mask(point.map.batch)
    refuse_weights(point.map.batch, "Cotangents carry their weights themselves, and what the gradients are used for")
    has_data = point.map.batch.x is not None
    if callable(cotangents):
        cotangents = cotangents(point.z if has_data else _tree.take(point.z, 0))
    is_stacked = check_cotangents(cotangents, point.z, has_data)
    return point.per_example(point.refuse_coupled(cotangents), is_stacked=is_stacked)


def check_cotangents(cotangents: PyTree, outputs: PyTree, has_data: bool) -> bool:
    """Whether there is an axis of several cotangents an example; anything else unlike the outputs is refused."""
    expected = jax.tree.map(lambda leaf: leaf.shape if has_data else leaf.shape[1:], outputs)
    given = jax.tree.map(jnp.shape, cotangents)
    if given == expected:
        return False
    leaves, structure = jax.tree.flatten(cotangents)
    shapes = [jnp.shape(leaf) for leaf in leaves]
    if structure == jax.tree.structure(outputs):
        sizes = {shape[:1] for shape in shapes}
        of_outputs = [leaf.shape if has_data else leaf.shape[1:] for leaf in jax.tree.leaves(outputs)]
        is_same = [shape[1:] for shape in shapes] == of_outputs
        if is_same and len(sizes) == 1 and sizes.isdisjoint({(), (0,)}):
            return True
    raise ValueError(
        f"{caller()} needs `cotangents` like the outputs of the model, of shape {expected}, perhaps with one more axis "
        f"in front, but got {given}."
    )
