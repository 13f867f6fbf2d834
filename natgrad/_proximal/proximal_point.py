import optimistix as optx
from jaxtyping import PyTree

from natgrad._check import public
from natgrad._proximal.inner import minimised
from natgrad._proximal.problem import ProximalProblem
from natgrad._proximal.step import ProximalStep, concluded


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
