"""Geometry you can check: does a step depend on the coordinates it is taken in?"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, PyTree

from natgrad import _linalg, _tree
from natgrad._check import Requirement, is_concrete, public, require
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
    """A model, a geometry on its outputs, a loss `loss(z, y)` of one example, and data. With `has_aux` a model returns
    `(z, aux)`, of which `aux` is left out."""

    model: Callable
    geometry: AbstractGeometry
    loss: Callable
    x: PyTree = None
    y: PyTree = None
    has_aux: bool = False

    def outputs(self, params: PyTree) -> Output:
        return OutputMap(without_aux(self.model, self.has_aux), Batch(self.x))(params)

    def cost(self, params: PyTree) -> Scalar:
        return jnp.mean(jax.vmap(self.loss)(self.outputs(params), self.y))

    def natural_gradient(self, params: PyTree, solver: lx.AbstractLinearSolver) -> PyTree:
        metric = pullback(self.model, self.geometry, params, self.x, has_aux=self.has_aux, check=False)
        return solve(metric, jax.grad(self.cost)(params), solver=solver).value

    def trajectory(self, params: PyTree, rate: Scalar | float, num_steps: int, direction: Callable) -> Output:
        """The outputs after so many steps of the given rate."""

        def step(params, _):
            return jax.tree.map(lambda w, d: w - rate * d, params, direction(params)), None

        return self.outputs(jax.lax.scan(step, params, None, length=num_steps)[0])


class Invariance(eqx.Module):
    """How far two coordinate systems lead apart, for each rate: the largest difference of the outputs, next to
    how far they moved at all."""

    rates: Float[Array, " rates"]
    natural_error: Float[Array, " rates"]
    gradient_error: Float[Array, " rates"]
    movement: Float[Array, " rates"]

    @property
    def order(self) -> Scalar:
        """The slope of the natural error against the rate on logarithmic axes: 2 for a nonlinear chart. Rounding has no
        slope: for an affine chart look at the errors themselves."""
        return slope(self.rates, self.natural_error)

    @property
    def gradient_order(self) -> Scalar:
        """The same slope for gradient descent: 1, since it already disagrees at first order."""
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
    r"""Compare steps taken in the coordinates $w$ with steps taken in $\theta$, where `chart(theta)` is `params`.

    Natural gradient steps agree exactly along whole trajectories for an affine chart if the metric is not
    singular, and to first order in the rate for any other chart or a singular metric. Gradient descent disagrees at
    first order unless the chart is a rotation. Undamped, with the pseudo-inverse by default."""
    solver = PseudoInverse() if solver is None else solver
    here = chart(theta)
    _check_same_point(params, here)
    other = task._replace(model=reparametrise(task.model, chart))
    start = task.outputs(params)

    def errors(rate):
        ends = []
        for direction in (lambda t, w: t.natural_gradient(w, solver), lambda t, w: jax.grad(t.cost)(w)):
            ends += [
                t.trajectory(w, rate, num_steps, lambda w, t=t, d=direction: d(t, w))
                for t, w in ((task, params), (other, theta))
            ]
        return largest_gap(ends[0], ends[1]), largest_gap(ends[2], ends[3]), largest_gap(ends[0], start)

    rates_array = jnp.asarray(rates)
    gaps = jax.jit(lambda rates: jax.lax.map(errors, rates))(rates_array)
    finite = Requirement(
        jnp.all(jnp.isfinite(jnp.stack(gaps))),
        "steps that stay finite",
        "Lower the rates, or use a solver that accepts a singular metric, such as `PseudoInverse()`.",
    )
    return Invariance(rates_array, *require(gaps, [finite], "`check_invariance`"))


class Projection(eqx.Module):
    """The two sides of the projection theorem, as changes of the outputs, and their largest difference."""

    pushforward: Float[Array, " outputs"]
    projection: Float[Array, " outputs"]
    error: Scalar


@public
def check_projection(task: Task, params: PyTree) -> Projection:
    r"""Verify at a point that the natural gradient, pushed forward to the outputs, is the gradient of the loss on
    the outputs, projected onto what the parameters can reach: $J G^+ J^\top d = \Pi\,M^+ d$, where $M$ is the metric
    of the outputs, $d$ the derivative of the mean loss in them and $\Pi$ the projection orthogonal in $M$ onto the
    columns of $J$. Holds whether or not parameters are redundant. Dense: for small models and batches."""
    z, unflatten = _tree.flatten(task.outputs(params))
    w, unravel = _tree.flatten(params)
    J = jax.jacobian(lambda w: _tree.flatten(task.outputs(unravel(w)))[0])(w)
    blocks = jax.vmap(task.geometry.metric_matrix)(task.outputs(params))
    M = _block_diagonal(blocks, task.outputs(params)) / len(blocks)
    d = jax.grad(lambda z: jnp.mean(jax.vmap(task.loss)(unflatten(z), task.y)))(z)
    natural = _linalg.pseudo_inverse(J.T @ M @ J) @ (J.T @ d)
    pushed = J @ natural
    values, vectors = _linalg.eigh(M)
    keep = values > len(values) * jnp.finfo(values.dtype).eps * jnp.max(values)
    whiten = jnp.where(keep, jnp.sqrt(jnp.where(keep, values, 1.0)), 0.0)[:, None] * vectors.T
    ambient = _linalg.pseudo_inverse(M) @ d
    # The point of the tangent space closest to the ambient gradient, by least squares in the metric of the outputs.
    nearest = _linalg.least_squares(whiten @ J, (whiten @ ambient)[:, None])[:, 0]
    projected = J @ nearest
    # Directions that the output metric cannot see are left out of the comparison.
    return Projection(pushed, projected, jnp.max(jnp.abs(whiten @ (pushed - projected))))


def _block_diagonal(blocks: Float[Array, "N n n"], outputs: Output) -> Float[Array, "all all"]:
    """Per-example matrices as one matrix on the flattened batch, whose entries are ordered leaf by leaf."""
    count = len(blocks)
    index = _tree.flatten(
        jax.tree.map(
            lambda leaf: jnp.broadcast_to(
                jnp.arange(count, dtype=blocks.dtype).reshape((-1,) + (1,) * (leaf.ndim - 1)), leaf.shape
            ),
            outputs,
        )
    )[0].astype(int)
    one = jax.tree.map(lambda leaf: leaf[0], outputs)
    flat, unflatten = _tree.flatten(one)
    numbers = unflatten(jnp.arange(flat.size, dtype=flat.dtype))
    entry = _tree.flatten(
        jax.tree.map(lambda number, leaf: jnp.broadcast_to(number[None], leaf.shape), numbers, outputs)
    )[0].astype(int)
    same = index[:, None] == index[None, :]
    return jnp.where(same, blocks[index[:, None], entry[:, None], entry[None, :]], 0.0)


def _check_same_point(params: PyTree, here: PyTree) -> None:
    if not is_concrete((params, here)):
        return
    gap, size = largest_gap(params, here), largest_gap(params, jax.tree.map(jnp.zeros_like, params))
    if not gap <= 1e-4 * (1 + size):
        raise ValueError(f"`check_invariance` needs `chart(theta)` to be `params`, but they differ by up to {gap:.3g}.")


def largest_gap(x: PyTree, y: PyTree) -> Scalar:
    return jnp.max(jnp.abs(_tree.flatten(x)[0] - _tree.flatten(y)[0]))


def slope(x: Float[Array, " n"], y: Float[Array, " n"]) -> Scalar:
    log_x, log_y = jnp.log(x), jnp.log(y)
    centred = log_x - jnp.mean(log_x)
    return jnp.vdot(centred, log_y) / jnp.vdot(centred, centred)
