from jaxtyping import PyTree

from natgrad import _tree
from natgrad._check import public
from natgrad._metric.base import SumMetric
from natgrad._metric.hessian import hessian
from natgrad._proximal.problem import ProximalProblem
from natgrad._proximal.step import PROXIMAL_RESULTS, ProximalStep, concluded
from natgrad._solve.base import AbstractSolver
from natgrad._solve.pseudo_inverse import PseudoInverse
from natgrad._solve.solve import solve


@public
def damped_newton_step(problem: ProximalProblem, w: PyTree, *, solver: AbstractSolver | None = None) -> ProximalStep:
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
