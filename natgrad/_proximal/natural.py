from typing import Any

import jax.numpy as jnp
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._check import public
from natgrad._proximal.problem import ProximalProblem
from natgrad._proximal.step import PROXIMAL_RESULTS, ProximalStep, concluded, within_domain
from natgrad._solve.base import AbstractSolver
from natgrad._solve.solve import solve


@public
def natural_step(
    problem: ProximalProblem, w: PyTree, *, damping: Any = 0.0, solver: AbstractSolver | None = None
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
