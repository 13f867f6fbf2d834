from typing import Any

import jax
import optimistix as optx
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._check import public
from natgrad._proximal.inner import minimised
from natgrad._proximal.problem import ProximalProblem
from natgrad._proximal.step import ProximalStep, concluded, within_domain
from natgrad._types import Scalar


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
