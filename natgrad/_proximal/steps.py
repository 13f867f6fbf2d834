"""Steps of the proximal family: the proximal point, and its approximations with a linear or quadratic cost and an exact
or quadratic dissimilarity."""

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
from natgrad._proximal.result import PROXIMAL_RESULTS, ProximalStep, conclude, within_domain
from natgrad._proximal.spaces import ProximalProblem
from natgrad._solve.direct import PseudoInverse
from natgrad._solve.solve import solve
from natgrad._types import Scalar

# Up to how many parameters BFGS keeps a dense estimate of the Hessian.
DENSE = 500


class Neighbourhood(NamedTuple):
    """The points around `w`, as flat vectors of changes that stay in the affine space where the geometry is defined."""

    problem: ProximalProblem
    w: PyTree

    @property
    def start(self) -> Float[Array, " P"]:
        """No change, in the default precision, which some solvers require."""
        return jnp.zeros(_tree.size(self.w), float)

    @property
    def eps(self) -> float:
        """Machine epsilon of the parameters."""
        return float(jnp.finfo(_tree.flatten(self.w)[0].dtype).eps)

    def point(self, change: Float[Array, " P"]) -> PyTree:
        """`w` plus a change, in the precision of `w`."""
        flat, unflatten = _tree.flatten(self.w)
        wide = jax.tree.map(lambda leaf: leaf.astype(change.dtype), self.w)
        step = self.problem.space.tangent(_tree.flatten(wide)[1](change))
        return unflatten(flat.astype(change.dtype) + _tree.flatten(step)[0])

    def distance(self, u: PyTree) -> Scalar:
        r"""$\rho(u, w)$, in the precision of changes."""
        return self.problem.space.dissimilarity(u, self.w).astype(self.start.dtype)

    def guard(self, function: Callable[[PyTree], Scalar]) -> Callable[[Array], Scalar]:
        """`function` as a function of the change, infinite outside the domain, where it is not evaluated."""

        def guarded(change: Float[Array, " P"]) -> Scalar:
            u = self.point(change)
            is_inside = self.problem.space.contains(u)
            safe = _tree.where(is_inside, u, self.w)
            # The function is called at `w` where the branch is not taken: NaN outside would spoil its derivative.
            return jnp.where(is_inside, function(safe), jnp.inf).astype(change.dtype)

        return guarded


class Minimum(NamedTuple):
    """The minimum of a function, its gradient there, and the number of steps to it."""

    value: PyTree
    gradient: PyTree
    num_steps: Int[Array, ""]


def minimise(
    problem: ProximalProblem,
    w: PyTree,
    function: Callable[[PyTree], Scalar],
    solver: optx.AbstractMinimiser | None,
    max_steps: int,
) -> Minimum:
    """The minimum of a function near `w` by a solver of optimistix, by default BFGS or, for many parameters, L-BFGS."""
    around = Neighbourhood(problem, w)
    if solver is None:
        tolerance = around.eps**0.75
        # BFGS stores a matrix.
        kind = optx.BFGS if around.start.size <= DENSE else optx.LBFGS
        solver = kind(rtol=tolerance, atol=tolerance)
    objective = around.guard(function)
    solution = optx.minimise(lambda d, _: objective(d), solver, around.start, max_steps=max_steps, throw=False)
    value = around.point(solution.value)
    return Minimum(value, jax.grad(function)(value), solution.stats["num_steps"])


@public
def proximal_point(
    problem: ProximalProblem, w: PyTree, *, solver: optx.AbstractMinimiser | None = None, max_steps: int = 1000
) -> ProximalStep:
    r"""The exact solution $u$ of the problem, where $\nabla J(u) + \mu\nabla_u\rho(u, w) = 0$.

    With the Euclidean distance it is implicit gradient descent, $u = w - \frac1\mu\nabla J(u)$; with the distance of a
    function space, implicit descent on the outputs. Found by an inner iteration from $w$, whose accuracy is `residual`.

    **Arguments:**

    - `problem`: cost, dissimilarity and strength.
    - `w`: the point to start from, a tree of arrays.
    - `solver`: a minimiser of optimistix, by default BFGS or, above 500 parameters, L-BFGS.
    - `max_steps`: of the inner iteration, by default 1000.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    problem = ng.ProximalProblem(lambda w: jnp.sum(w**2), ng.Euclidean(), strength=2.0)
    step = ng.proximal_point(problem, jnp.array([1.0]))
    assert jnp.allclose(step.value, 0.5, atol=1e-4)  # 2u + 2(u - 1) = 0
    ```
    """
    problem.check(w)
    mu = problem.strength

    def objective(u):
        cost, distance = problem.cost(u), problem.space.dissimilarity(u, w)
        return cost + (mu * distance).astype(cost.dtype)

    minimum = minimise(problem, w, objective, solver, max_steps)
    return conclude(problem, w, minimum.value, minimum.gradient, num_steps=minimum.num_steps, has_inner=True)


@public
def mirror_step(
    problem: ProximalProblem, w: PyTree, *, solver: optx.AbstractMinimiser | None = None, max_steps: int = 1000
) -> ProximalStep:
    r"""Mirror descent: minimise $\langle\nabla J(w), u\rangle + \mu\,\rho(u, w)$, with the cost linear at $w$.

    For the Bregman divergence of $\phi$ the step is $\nabla\phi(u) = \nabla\phi(w) - \frac1\mu\nabla J(w)$. It has a
    closed form for

    - `Euclidean()`: gradient descent;
    - `Fisher(family)`, where $w$ are natural parameters: the moments move against the gradient in natural parameters,
      which is exactly the natural-gradient step of the moments;
    - `DualFisher(family)`, where $w$ are moments: the natural parameters move against the gradient in moments, exactly
      the natural-gradient step of the natural parameters; for `Categorical` it is exponentiated gradient;
    - multiples and products of these.

    Other dissimilarities need an inner iteration with `solver` and `max_steps` as in `proximal_point`. If a step in
    closed form would leave the domain, `strength` is doubled until it stays inside, and `result` says so.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    # Exponentiated gradient: probabilities are multiplied by the exponential of minus the losses.
    losses = jnp.array([0.0, jnp.log(3.0)])
    problem = ng.ProximalProblem(lambda p: losses @ p, ng.DualFisher(ng.Categorical()))
    assert jnp.allclose(ng.mirror_step(problem, jnp.array([0.5, 0.5])).value, jnp.array([0.75, 0.25]))
    ```
    """
    problem.check(w)
    gradient = problem.gradient(w)

    def mirror(strength: Scalar) -> Any:
        return problem.space.mirror(w, _tree.scale(1 / strength, gradient))

    if jax.eval_shape(mirror, problem.strength) is not None:
        step = within_domain(problem, w, mirror)
        mismatch = jax.grad(_linear_objective(problem, w, gradient, step.strength))(step.point)
        return conclude(problem, w, step.point, mismatch, strength=step.strength, result=step.result)
    minimum = minimise(problem, w, _linear_objective(problem, w, gradient, problem.strength), solver, max_steps)
    return conclude(problem, w, minimum.value, minimum.gradient, num_steps=minimum.num_steps, has_inner=True)


def _linear_objective(problem: ProximalProblem, w: PyTree, gradient: PyTree, strength: Scalar) -> Any:
    r"""$\langle g, u - w\rangle + \mu\,\rho(u, w)$ as a function of $u$."""

    def objective(u):
        distance = problem.space.dissimilarity(u, w)
        return _tree.vdot(gradient, _tree.subtract(u, w)) + strength.astype(distance.dtype) * distance

    return objective


@public
def natural_step(
    problem: ProximalProblem, w: PyTree, *, damping: Any = 0.0, solver: lx.AbstractLinearSolver | None = None
) -> ProximalStep:
    r"""The natural-gradient step $w - \frac1\mu G^{-1}\nabla J(w)$: cost linear and dissimilarity quadratic at $w$.

    With the Euclidean distance it is gradient descent with learning rate $1/\mu$. With large `damping` $\lambda$
    (default 0) in $(G + \lambda I)^{-1}$ it approaches gradient descent with learning rate $1/(\mu\lambda)$. The
    default `solver` is `Auto()`.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    problem = ng.ProximalProblem(lambda w: jnp.sum(w**2), ng.FunctionSpace(lambda w: 2 * w, ng.Euclidean()), 2.0)
    ng.natural_step(problem, jnp.ones(2)).value
    ```
    """
    problem.check(w)
    gradient, metric = problem.gradient(w), problem.space.metric(w)
    solution = solve(metric, gradient, damping=damping, solver=solver)

    def candidate(strength):
        return _tree.subtract(w, _tree.scale(1 / strength, solution.value)), jnp.array(True)

    inside = within_domain(problem, w, candidate)
    results: Any = PROXIMAL_RESULTS
    is_whole = inside.result == results.successful
    result = results.where(is_whole, PROXIMAL_RESULTS.promote(solution.result), inside.result)
    step = _tree.subtract(inside.point, w)
    damped = _tree.add(metric.mv(step), _tree.scale(damping, step))
    mismatch = _tree.add(gradient, _tree.scale(inside.strength, damped))
    return conclude(problem, w, inside.point, mismatch, strength=inside.strength, result=result)


@public
def damped_newton_step(
    problem: ProximalProblem, w: PyTree, *, solver: lx.AbstractLinearSolver | None = None
) -> ProximalStep:
    r"""The damped Newton step $w - (\nabla^2J(w) + \mu G)^{-1}\nabla J(w)$: cost and dissimilarity quadratic at $w$.

    With the Euclidean distance it is Newton's method with damping $\mu$. The step goes to a stationary point of the
    quadratic model, which is a minimum only where $\nabla^2J + \mu G$ is positive definite. Near a saddle of the cost
    and with little strength it goes towards the saddle, and `result` says so. The default `solver` is
    `PseudoInverse()`.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    problem = ng.ProximalProblem(lambda w: jnp.sum(w**2), ng.Euclidean(), strength=2.0)
    step = ng.damped_newton_step(problem, jnp.array([1.0]))
    assert jnp.allclose(step.value, 0.5)  # 1 - (2 + 2)^-1 2
    ```
    """
    problem.check(w)
    gradient = problem.gradient(w)
    curvature = SumMetric((hessian(problem.cost, w), problem.strength * problem.space.metric(w)))
    solution = solve(curvature, gradient, solver=PseudoInverse() if solver is None else solver)
    value = _tree.subtract(w, solution.value)
    mismatch = _tree.add(gradient, curvature.mv(_tree.subtract(value, w)))
    return conclude(problem, w, value, mismatch, result=PROXIMAL_RESULTS.promote(solution.result))
