r"""Checks of invariance: whether steps depend on the coordinates of the parameters, and the projection theorem.

In coordinates $\theta$ with $w = c(\theta)$, a natural-gradient step changes the outputs by $-\rho\,J G^+ J^\top d$,
which does not depend on the chart $c$ to first order in the learning rate $\rho$."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, PyTree

from natgrad import _linalg, _tree
from natgrad._check import Requirement, caller, is_concrete, public, require
from natgrad._geometry.base import AbstractGeometry
from natgrad._manifold.musical import reparametrise
from natgrad._metric.pullback import pullback
from natgrad._model import without_aux
from natgrad._point.batch import Batch
from natgrad._point.point import OutputMap
from natgrad._solve.direct import PseudoInverse
from natgrad._solve.solve import solve
from natgrad._types import Output, Scalar


class Task(NamedTuple):
    """A model with a geometry, a loss and data, for `check_invariance` and `check_projection`.

    **Arguments:**

    - `model`: `model(params, x) -> z`, or `model(params) -> z` without `x`.
    - `geometry`: a geometry of the output of one example.
    - `loss`: `loss(z, y)` of one example.
    - `x`, `y`: inputs and targets with the examples along the leading axis; default `None`.
    - `has_aux`: whether the model returns `(z, aux)`, of which `aux` is ignored; default `False`.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    x, y = jnp.array([1.0, 2.0]), jnp.array([2.0, 4.0])
    task = ng.Task(lambda w, x: x * w, ng.Euclidean(), lambda z, y: (z - y) ** 2 / 2, x, y)
    assert jnp.allclose(task.cost(jnp.array(0.0)), 5.0)
    assert jnp.allclose(task.natural_gradient(jnp.array(0.0), ng.PseudoInverse()), -2.0)
    ```
    """

    model: Callable
    geometry: AbstractGeometry
    loss: Callable
    x: PyTree = None
    y: PyTree = None
    has_aux: bool = False

    def outputs(self, params: PyTree) -> Output:
        """The outputs of all examples."""
        return OutputMap(without_aux(self.model, self.has_aux), Batch(self.x))(params)

    def cost(self, params: PyTree) -> Scalar:
        """The mean loss."""
        return jnp.mean(jax.vmap(self.loss)(self.outputs(params), self.y))

    def natural_gradient(self, params: PyTree, solver: lx.AbstractLinearSolver) -> PyTree:
        r"""$G^+\nabla J$, without damping."""
        metric = pullback(self.model, self.geometry, params, self.x, has_aux=self.has_aux, check=False)
        return solve(metric, jax.grad(self.cost)(params), solver=solver).value

    def trajectory(self, params: PyTree, rate: Scalar | float, num_steps: int, direction: Callable) -> Output:
        """The outputs after `num_steps` steps of `rate` against `direction(params)`."""

        def step(params, _):
            return jax.tree.map(lambda w, d: w - rate * d, params, direction(params)), None

        return self.outputs(jax.lax.scan(step, params, None, length=num_steps)[0])


class Invariance(eqx.Module):
    """The result of `check_invariance`, for every learning rate.

    **Attributes:**

    - `rates`: the learning rates.
    - `natural_error`, `gradient_error`: the largest difference between the outputs after steps in the two coordinate
      systems, for natural gradients and for gradient descent.
    - `movement`: the largest change of the outputs by the natural-gradient steps, to compare with.
    """

    rates: Float[Array, " rates"]
    natural_error: Float[Array, " rates"]
    gradient_error: Float[Array, " rates"]
    movement: Float[Array, " rates"]

    @property
    def order(self) -> Scalar:
        """The slope of `natural_error` against the learning rate on logarithmic axes: 2 for a nonlinear chart. For an
        affine chart the errors are rounding, and their slope means nothing."""
        return slope(self.rates, self.natural_error)

    @property
    def gradient_order(self) -> Scalar:
        """The slope of `gradient_error`: 1, since gradient descent depends on the coordinates at first order."""
        return slope(self.rates, self.gradient_error)


@public
def check_invariance(
    task: Task,
    params: PyTree,
    chart: Callable[[PyTree], PyTree],
    theta: PyTree,
    *,
    rates: Sequence[float] = (1e-2, 1e-3, 1e-4),
    num_steps: int = 1,
    solver: lx.AbstractLinearSolver | None = None,
) -> Invariance:
    r"""Compare steps in the coordinates $w$ with steps in the coordinates $\theta$, where `chart(theta)` is `params`.

    Natural-gradient steps agree exactly along whole trajectories if the chart is affine and the metric is not singular,
    and to first order in the learning rate otherwise. Gradient descent disagrees at first order unless the chart is a
    rotation.

    **Arguments:**

    - `task`: model, geometry, loss and data.
    - `params`, `theta`: the same point in both coordinate systems.
    - `chart`: the map from `theta` to `params`.
    - `rates`: learning rates to compare, by default 1e-2, 1e-3 and 1e-4.
    - `num_steps`: steps of each trajectory, by default 1.
    - `solver`: for the undamped metric, by default `PseudoInverse()`.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    task = ng.Task(lambda w, x: x @ w, ng.Euclidean(), lambda z, y: (z - y) ** 2, jnp.eye(2), jnp.ones(2))
    ng.check_invariance(task, jnp.array([1.0, 8.0]), lambda theta: theta**3, jnp.array([1.0, 2.0])).natural_error
    ```
    """
    solver = PseudoInverse() if solver is None else solver
    _check_same_point(params, chart(theta))
    charted = task._replace(model=reparametrise(task.model, chart))
    start = task.outputs(params)

    def errors(rate):
        def end(coordinates: Task, point: PyTree, is_natural: bool) -> Output:
            natural = functools.partial(coordinates.natural_gradient, solver=solver)
            direction = natural if is_natural else jax.grad(coordinates.cost)
            return coordinates.trajectory(point, rate, num_steps, direction)

        natural_w, natural_theta = end(task, params, True), end(charted, theta, True)
        plain_w, plain_theta = end(task, params, False), end(charted, theta, False)
        gaps = (natural_w, natural_theta), (plain_w, plain_theta), (natural_w, start)
        return tuple(largest_gap(first, second) for first, second in gaps)

    rates_array = jnp.asarray(rates)
    gaps = jax.jit(lambda rates: jax.lax.map(errors, rates))(rates_array)
    finite = Requirement(
        jnp.all(jnp.isfinite(jnp.stack(gaps))),
        "steps that stay finite",
        "Lower the learning rates, or use a solver that accepts a singular metric, such as `PseudoInverse()`.",
    )
    return Invariance(rates_array, *require(gaps, [finite]))


class Projection(eqx.Module):
    """The two sides of the projection theorem as changes of the outputs, and their largest difference `error`."""

    pushforward: Float[Array, " outputs"]
    projection: Float[Array, " outputs"]
    error: Scalar


@public
def check_projection(task: Task, params: PyTree) -> Projection:
    r"""Compute both sides of the projection theorem, $J G^+ J^\top d = \Pi\,M^+ d$, at `params`.

    The natural gradient pushed forward to the outputs is the gradient on the outputs projected onto the changes that
    the parameters can reach. Here $M$ is the metric of the outputs, $d$ the derivative of the mean loss in the outputs,
    and $\Pi$ the projection onto the columns of $J$ that is orthogonal in $M$. The theorem holds whether or not
    parameters are redundant. Matrices are dense: for small models and batches.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    task = ng.Task(lambda w, x: x @ w, ng.Euclidean(), lambda z, y: (z - y) ** 2, jnp.ones((3, 2)), jnp.ones(3))
    ng.check_projection(task, jnp.zeros(2)).error  # zero to rounding
    ```
    """
    z, unflatten = _tree.flatten(task.outputs(params))
    w, unravel = _tree.flatten(params)
    J = jax.jacobian(lambda w: _tree.flatten(task.outputs(unravel(w)))[0])(w)
    blocks = jax.vmap(task.geometry.metric_matrix)(task.outputs(params))
    M = _block_diagonal(blocks, task.outputs(params)) / len(blocks)
    d = jax.grad(lambda z: jnp.mean(jax.vmap(task.loss)(unflatten(z), task.y)))(z)
    natural = _linalg.pseudo_inverse(J.T @ M @ J) @ (J.T @ d)
    pushed = J @ natural
    values, vectors = _linalg.eigh(M)
    is_positive = values > len(values) * jnp.finfo(values.dtype).eps * jnp.max(values)
    # Eigenvalues that are zero come out negative by rounding, and would have NaN for a root.
    whiten = jnp.where(is_positive, jnp.sqrt(jnp.where(is_positive, values, 1.0)), 0.0)[:, None] * vectors.T
    gradient = _linalg.pseudo_inverse(M) @ d
    # The reachable change closest to the gradient on the outputs, by least squares in the metric of the outputs.
    nearest = _linalg.least_squares(whiten @ J, (whiten @ gradient)[:, None])[:, 0]
    projected = J @ nearest
    # Directions in which the metric of the outputs is zero are left out of the comparison.
    return Projection(pushed, projected, jnp.max(jnp.abs(whiten @ (pushed - projected))))


def _block_diagonal(blocks: Float[Array, "N n n"], outputs: Output) -> Float[Array, "all all"]:
    """Per-example matrices as one matrix on the flattened batch, whose entries are ordered leaf by leaf."""

    def numbers(leaf: Array) -> Array:
        """The number of the example of every entry."""
        column = jnp.arange(len(blocks), dtype=blocks.dtype).reshape((-1,) + (1,) * (leaf.ndim - 1))
        return jnp.broadcast_to(column, leaf.shape)

    example = _tree.flatten(jax.tree.map(numbers, outputs))[0].astype(int)
    flat, unflatten = _tree.flatten(_tree.take(outputs, 0))
    places = unflatten(jnp.arange(flat.size, dtype=flat.dtype))
    repeated = jax.tree.map(lambda place, leaf: jnp.broadcast_to(place[None], leaf.shape), places, outputs)
    entry = _tree.flatten(repeated)[0].astype(int)
    is_same = example[:, None] == example[None, :]
    return jnp.where(is_same, blocks[example[:, None], entry[:, None], entry[None, :]], 0.0)


def _check_same_point(params: PyTree, image: PyTree) -> None:
    if not is_concrete((params, image)):
        return
    gap, size = largest_gap(params, image), largest_gap(params, jax.tree.map(jnp.zeros_like, params))
    # Not `>`, which would let NaN pass.
    if not gap <= 1e-4 * (1 + size):
        raise ValueError(f"{caller()} needs `chart(theta)` to be `params`, but they differ by up to {gap:.3g}.")


def largest_gap(x: PyTree, y: PyTree) -> Scalar:
    """The largest absolute difference between two trees."""
    return jnp.max(jnp.abs(_tree.flatten(x)[0] - _tree.flatten(y)[0]))


def slope(x: Float[Array, " n"], y: Float[Array, " n"]) -> Scalar:
    """The slope of a line through points on logarithmic axes, by least squares."""
    log_x, log_y = jnp.log(x), jnp.log(y)
    centred = log_x - jnp.mean(log_x)
    return jnp.vdot(centred, log_y) / jnp.vdot(centred, centred)
