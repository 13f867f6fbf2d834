"""What came of a solve."""

from abc import abstractmethod
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Float, PyTree

from natgrad import _tree
from natgrad._check import check_damping, real_array
from natgrad._metric.base import AbstractMetric
from natgrad._model import check_structure
from natgrad._types import Matrix, Scalar
from natgrad._vector import Covector, Vector, untyped


class RESULTS(eqx.Enumeration):
    """Outcomes of a solve; the text of each explains itself."""

    successful = "The system was solved."
    max_steps_reached = (
        "The iteration stopped at `max_steps` before the residual fell below `rtol`. The value is the best so far: a "
        "descent direction for a positive definite metric, but not the solution. Allow more steps, raise the damping, "
        "or give a preconditioner."
    )
    not_positive_definite = (
        "The metric plus damping is not positive definite. Likely causes: (a) the damping is zero or too small for a "
        "metric with redundant parameters: raise it, or use `PseudoInverse`; (b) the operator is a Hessian with "
        "negative curvature: use `gauss_newton` or `pullback`; (c) single precision is too little for its condition "
        "number: use float64."
    )
    inaccurate = (
        "The solution leaves a residual far above rounding. Likely causes: (a) the damping is tiny next to the metric: "
        "raise it, or pass `SampleSpace(cotangents=...)`; (b) single precision is too little for the condition number: "
        "use float64."
    )
    not_finite = (
        "The solution is not finite. Likely causes: NaN or infinity in the covector, the parameters or the data, or an "
        "overflow in the model."
    )


class Solution(eqx.Module):
    """The answer of `natgrad.solve`.

    **Attributes:**

    - `value`: the solution, a tree like the parameters; a `Vector` if the right-hand side was a `Covector`.
    - `result`: a member of `natgrad.RESULTS`; its text says what happened.
    - `stats`: numbers about the solve: the relative `residual`, and steps, rank or rows.
    - `solver`: which solver did it, and why `Auto` picked it.
    """

    value: PyTree
    result: RESULTS
    stats: dict
    solver: str = eqx.field(static=True)


class System(NamedTuple):
    r"""The equation $(G + \lambda I)v = g$, with trees flattened into vectors of one dtype."""

    operator: lx.AbstractLinearOperator
    covector: Float[Array, " P"]
    damping: Scalar
    unflatten: Any
    is_undamped: bool

    def mv(self, v: Float[Array, " P"]) -> Float[Array, " P"]:
        r"""$(G + \lambda I)v$."""
        return _tree.flatten(self.operator.mv(self.unflatten(v)))[0].astype(v.dtype) + self.damping * v

    def matrix(self) -> Matrix:
        matrix = self.operator.as_matrix().astype(self.covector.dtype)
        return matrix + self.damping * jnp.eye(len(matrix), dtype=matrix.dtype)


class AbstractSolver(eqx.Module):
    """A way to solve $(G + \\lambda I)v = g$."""

    @abstractmethod
    def compute(self, system: System) -> tuple[Float[Array, " P"], RESULTS, dict]:
        """The solution, the outcome, and numbers about it."""

    def pick(self, system: System) -> tuple["AbstractSolver", str]:
        """The solver that will do it, and a note on which that is."""
        del system
        return self, type(self).__name__


def solve_system(
    operator: lx.AbstractLinearOperator, covector: PyTree, damping: Any, solver: AbstractSolver
) -> Solution:
    tree, typed = untyped(covector, Covector)
    check_structure(operator.in_structure(), tree, "`solve`: the covector")
    flat, _ = _tree.flatten(tree)
    _, unflatten = _tree.flatten(operator._zeros() if isinstance(operator, AbstractMetric) else tree)
    is_undamped = check_damping(damping)
    damping = real_array(damping, "`solve`: `damping`", flat.dtype)
    system = System(operator, flat, damping, unflatten, is_undamped)
    chosen, note = solver.pick(system)
    value, result, stats = chosen.compute(system)
    size = jnp.linalg.norm(flat)
    residual = jnp.linalg.norm(system.mv(value) - flat) / jnp.where(size > 0, size, 1.0)
    explained = jnp.all(jnp.isfinite(value)) | (result == RESULTS.not_positive_definite)
    result = RESULTS.where(explained, result, RESULTS.not_finite)
    solution = unflatten(value)
    return Solution(Vector(solution) if typed else solution, result, {**stats, "residual": residual}, note)


def accurate(system: System, value: Float[Array, " P"]) -> RESULTS:
    """The outcome of a direct solve: successful if at least half the digits are right."""
    half = jnp.finfo(value.dtype).eps ** 0.5
    small = jnp.linalg.norm(system.mv(value) - system.covector) <= half * jnp.linalg.norm(system.covector)
    return RESULTS.where(small, RESULTS.successful, RESULTS.inaccurate)
