"""Steps of the proximal family: the proximal point itself, and its approximations by a linear cost, a quadratic
distance or both."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import lineax as lx
import optimistix as optx
from jaxtyping import Array, Float, Int, PyTree

from natgrad import _tree
from natgrad._check import public
from natgrad._metric.base import SumMetric
from natgrad._metric.hessian import hessian
from natgrad._proximal.result import PROXIMAL_RESULTS, ProximalStep, concluded, within_domain
from natgrad._proximal.spaces import ProximalProblem
from natgrad._solve.direct import PseudoInverse
from natgrad._solve.solve import solve
from natgrad._types import Scalar

# Up to how many parameters a dense estimate of the Hessian is kept.
DENSE = 500


class Around(NamedTuple):
    """The points around one: changes of it as vectors, which stay in the affine space where the geometry is defined."""

    problem: ProximalProblem
    w: PyTree

    @property
    def start(self) -> Float[Array, " P"]:
        """No change, in the default precision, which some solvers insist on."""
        return jnp.zeros(_tree.size(self.w), float)

    @property
    def eps(self) -> float:
        """The rounding of the parameters."""
        return float(jnp.finfo(_tree.flatten(self.w)[0].dtype).eps)

    def point(self, change: Float[Array, " P"]) -> PyTree:
        flat, unflatten = _tree.flatten(self.w)
        wide = jax.tree.map(lambda leaf: leaf.astype(change.dtype), self.w)
        step = self.problem.space.tangent(_tree.flatten(wide)[1](change))
        return unflatten(flat.astype(change.dtype) + _tree.flatten(step)[0])

    def guarded(self, function: Callable[[PyTree], Scalar]) -> Callable[[Array], Scalar]:
        """A function of the change, infinite outside the domain, where it is not evaluated."""

        def of_change(change: Float[Array, " P"]) -> Scalar:
            u = self.point(change)
            is_inside = self.problem.space.contains(u)
            safe = jax.tree.map(lambda new, old: jnp.where(is_inside, new, old), u, self.w)
            return jnp.where(is_inside, function(safe), jnp.inf).astype(change.dtype)

        return of_change


class Minimum(NamedTuple):
    value: PyTree
    gradient: PyTree
    num_steps: Int[Array, ""]


def minimised(
    problem: ProximalProblem,
    w: PyTree,
    function: Callable[[PyTree], Scalar],
    solver: optx.AbstractMinimiser | None,
    max_steps: int,
) -> Minimum:
    """The minimum of a function near a point, by a solver of optimistix: BFGS by default, with limited memory if there
    are many parameters."""
    around = Around(problem, w)
    if solver is None:
        tolerance = around.eps**0.75
        kind = optx.BFGS if around.start.size <= DENSE else optx.LBFGS
        solver = kind(rtol=tolerance, atol=tolerance)
    objective = around.guarded(function)
    found = optx.minimise(lambda d, _: objective(d), solver, around.start, max_steps=max_steps, throw=False)
    value = around.point(found.value)
    return Minimum(value, jax.grad(function)(value), found.stats["num_steps"])


@public
def proximal_point(
    problem: ProximalProblem, w: PyTree, *, solver: optx.AbstractMinimiser | None = None, max_steps: int = 1000
) -> ProximalStep:
    r"""The solution $u$ of the problem itself, where $\nabla J(u) + \mu\nabla_u\rho(u, w) = 0$.

    With the Euclidean distance it is implicit gradient descent, $u = w - \frac1\mu\nabla J(u)$; with that of a function
    space, implicit descent on the outputs. Found by an inner iteration from $w$, with a `solver` of optimistix; look at
    `residual`."""
    problem.check(w)
    mu = problem.strength

    def objective(u):
        cost, distance = problem.cost(u), problem.space.dissimilarity(u, w)
        return cost + (mu * distance).astype(cost.dtype)

    found = minimised(problem, w, objective, solver, max_steps)
    return concluded(problem, w, found.value, found.gradient, num_steps=found.num_steps, has_inner=True)


@public
def mirror_step(
    problem: ProximalProblem, w: PyTree, *, solver: optx.AbstractMinimiser | None = None, max_steps: int = 1000
) -> ProximalStep:
    r"""Mirror descent: the minimum of the cost made linear at $w$ plus $\mu$ times the dissimilarity as it is.

    For the Bregman divergence of $\phi$ that is $\nabla\phi(u) = \nabla\phi(w) - \frac1\mu\nabla J(w)$, in closed form
    for

    - `Euclidean()`: gradient descent;
    - `Fisher(family)`, where $w$ are natural parameters: the moments move against the gradient in natural parameters,
      which is exactly the natural-gradient step of the moments;
    - `DualFisher(family)`, where $w$ are moments: the natural parameters move against the gradient in moments, exactly
      the natural-gradient step of the natural parameters; for `Categorical` it is exponentiated gradient;
    - multiples and products of these.

    Anything else is minimised by an inner iteration, as in `proximal_point`. A step in closed form that would leave the
    domain is made shorter, and `result` says so."""
    problem.check(w)
    gradient = problem.gradient(w)
    moved = lambda strength: problem.space.mirrored(w, _tree.scale(1 / strength, gradient))
    if jax.eval_shape(moved, problem.strength) is not None:
        found = within_domain(problem, w, moved)
        mismatch = jax.grad(_linearised(problem, w, gradient, found.strength))(found.point)
        return concluded(problem, w, found.point, mismatch, strength=found.strength, result=found.result)
    inner = minimised(problem, w, _linearised(problem, w, gradient, problem.strength), solver, max_steps)
    return concluded(problem, w, inner.value, inner.gradient, num_steps=inner.num_steps, has_inner=True)


def _linearised(problem: ProximalProblem, w: PyTree, gradient: PyTree, strength: Scalar) -> Any:
    def objective(u):
        distance = problem.space.dissimilarity(u, w)
        return _tree.vdot(gradient, _tree.subtract(u, w)) + strength.astype(distance.dtype) * distance

    return objective


@public
def natural_step(
    problem: ProximalProblem, w: PyTree, *, damping: Any = 0.0, solver: lx.AbstractLinearSolver | None = None
) -> ProximalStep:
    r"""The natural gradient, $w - \frac1\mu G^{-1}\nabla J(w)$: the minimum of the cost made linear plus $\mu$ times
    the dissimilarity made quadratic.

    With the Euclidean distance it is gradient descent with rate $1/\mu$, and so it is as `damping` $\lambda$ grows, in
    $(G + \lambda I)^{-1}$, but for a factor. The default solver is `Auto()`."""
    problem.check(w)
    gradient, metric = problem.gradient(w), problem.space.metric(w)
    solution = solve(metric, gradient, damping=damping, solver=solver)

    def candidate(strength):
        return _tree.subtract(w, _tree.scale(1 / strength, solution.value)), jnp.array(True)

    found = within_domain(problem, w, candidate)
    results: Any = PROXIMAL_RESULTS
    is_whole = found.result == results.successful
    result = results.where(is_whole, PROXIMAL_RESULTS.promote(solution.result), found.result)
    step = _tree.subtract(found.point, w)
    pulled = _tree.add(metric.mv(step), _tree.scale(damping, step))
    mismatch = _tree.add(gradient, _tree.scale(found.strength, pulled))
    return concluded(problem, w, found.point, mismatch, strength=found.strength, result=result)


@public
def damped_newton_step(
    problem: ProximalProblem, w: PyTree, *, solver: lx.AbstractLinearSolver | None = None
) -> ProximalStep:
    r"""$w - (\nabla^2J(w) + \mu G)^{-1}\nabla J(w)$: where the cost made quadratic plus $\mu$ times the dissimilarity
    made quadratic is stationary.

    With the Euclidean distance it is Newton's method with damping $\mu$. That is a minimum only where the sum is
    positive definite; near a saddle of the cost with little strength it is not, the step goes towards the saddle, and
    `result` says so. The default solver is `PseudoInverse()`."""
    problem.check(w)
    gradient = problem.gradient(w)
    curvature = SumMetric((hessian(problem.cost, w), problem.strength * problem.space.metric(w)))
    solution = solve(curvature, gradient, solver=PseudoInverse() if solver is None else solver)
    value = _tree.subtract(w, solution.value)
    mismatch = _tree.add(gradient, curvature.mv(_tree.subtract(value, w)))
    return concluded(problem, w, value, mismatch, result=PROXIMAL_RESULTS.promote(solution.result))
