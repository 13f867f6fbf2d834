from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool, PyTree

from natgrad import _tree
from natgrad._check import caller, is_concrete, public
from natgrad._geometry.base import AbstractGeometry
from natgrad._metric.base import AbstractMetric
from natgrad._metric.block_metric import BlockMetric
from natgrad._metric.pullback import pullback
from natgrad._model import check_structure
from natgrad._point.point import Point
from natgrad._solve.base import RESULTS, AbstractSolver, DampedMetric, Flat, Solution
from natgrad._solve.cg import CG
from natgrad._solve.direct import Blockwise, Cholesky, Elementwise, PseudoInverse
from natgrad._solve.sample_space import SampleSpace
from natgrad._vector import Covector, Vector, untyped

# Sizes up to which a dense factorisation takes well under a second on one core.
DENSE = 2000


class Auto(AbstractSolver):
    """Picks a solver by sizes and says in `Solution.solver` which and why.

    With `dense` the largest matrix it will factorise: few parameters, the dense matrix (`Cholesky`, or
    `PseudoInverse` without damping); few samples, `SampleSpace`; otherwise `CG`. A diagonal metric is divided by, and
    one made of blocks is solved block by block.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    metric = ng.hessian(lambda w: w @ w, jnp.zeros(2))
    solution = ng.solve(metric, jnp.ones(2), damping=0.5, solver=ng.Auto(dense=100))
    assert jnp.allclose(solution.value, 0.4) and "Cholesky" in solution.solver
    ```
    """

    dense: int = DENSE

    def init(self, operator, options):
        solver, _ = self.choose(operator)
        return solver, solver.init(operator, options)

    def compute(self, state, vector, options):
        solver, inner = state
        return solver.compute(inner, vector, options)

    def assume_full_rank(self):
        return False

    def choose(self, operator: DampedMetric) -> tuple[AbstractSolver, str]:
        """The solver for a metric, and why it is chosen."""
        metric, size = operator.metric, operator.in_size()
        rows = metric.root_size if isinstance(metric, AbstractMetric) else None
        if operator.is_diagonal:
            return Elementwise(), "the metric is diagonal"
        if isinstance(metric, BlockMetric):
            return Blockwise(), "the metric is made of blocks"
        if not operator.is_traceable:
            return CG(), "the metric runs over a data loader"
        if rows is not None and rows < size and rows <= self.dense and not operator.is_undamped:
            return SampleSpace(), f"{rows} samples are fewer than {size} parameters"
        if size <= self.dense:
            if operator.is_undamped:
                return PseudoInverse(), f"{size} parameters fit a dense matrix, and there is no damping"
            return Cholesky(), f"{size} parameters fit a dense matrix"
        return CG(), f"{size} parameters are too many for a dense matrix"


class TracedSolver(AbstractSolver):
    """Solves by calling its state: a function that was traced once, so that all arrays which a metric or a solver
    closes over are leaves of it.

    The result goes into `stats`: lineax raises if a derivative has another result than `successful`, and `CG` may be
    stopped early on purpose."""

    is_full_rank: bool = eqx.field(static=True)

    def init(self, operator, options):
        raise AssertionError("unreachable: the state is given")

    def compute(self, state, vector, options):
        value, result, stats = state(vector)
        return value, lx.RESULTS.successful, {"result": result, "stats": stats}

    def assume_full_rank(self):
        return self.is_full_rank


@public
def solve(
    operator: lx.AbstractLinearOperator,
    covector: PyTree,
    *,
    damping: Any = 0.0,
    solver: lx.AbstractLinearSolver | None = None,
) -> Solution:
    r"""Solve $(G + \lambda I)v = g$ for a metric $G$, a covector $g$ and damping $\lambda \ge 0$.

    Never raises for a numerical failure: look at `result`, whose text says what went wrong, and at `stats`. A
    `Covector` gives a `Vector`; a plain tree gives a plain tree. Parameters of different dtypes are solved for in
    the widest of them. The default solver is `Auto()`; any `lineax.AbstractLinearSolver` is accepted.

    The solution can be differentiated in forward and reverse mode with respect to the metric, the covector and the
    damping. The derivative is that of the equation, also where `CG` stopped early.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    metric = ng.DiagonalMetric(jnp.array([1.0, 4.0]))
    solution = ng.solve(metric, jnp.ones(2), damping=1.0)
    assert jnp.allclose(solution.value, jnp.array([0.5, 0.2])) and solution.result == ng.RESULTS.successful
    ```
    """
    solver = Auto() if solver is None else solver
    if not isinstance(solver, lx.AbstractLinearSolver):
        raise TypeError(
            f"{caller()} needs a solver of natgrad or lineax, such as `CG()`, but got `{solver}`. Pass an instance."
        )
    tree, is_typed = untyped(covector, Covector)
    check_structure(operator.in_structure(), tree, "`solve`: the covector")
    b, _ = _tree.flatten(tree)
    damped = DampedMetric(operator, damping, b.dtype)
    note = type(solver).__name__
    if isinstance(solver, Auto):
        solver, reason = solver.choose(damped)
        note = f"{type(solver).__name__}, because {reason}"
    value, result, stats = solve_flat(damped, b, solver)
    tree = damped.unflatten(value)
    return Solution(Vector(tree) if is_typed else tree, result, stats, note)


def solve_flat(damped: DampedMetric, b: Flat, solver: lx.AbstractLinearSolver) -> tuple[Flat, RESULTS, dict]:
    """The solution, which can be differentiated; the outcome and numbers about it, which are constants."""
    operator: lx.AbstractLinearOperator = damped
    if damped.is_traceable:
        # Arrays that the geometry or the loss of a metric closes over become leaves, to be traced and differentiated.
        operator = lx.FunctionLinearOperator(damped.mv, damped.in_structure(), lx.symmetric_tag)
    options = {"covector": stopped(b)}
    if is_concrete((operator, b, solver)):
        # Nothing to compile or to differentiate, and a data loader could not be.
        value, result, stats = solver.compute(solver.init(damped, options), b, options)
    else:
        value, result, stats = solve_traced(damped, operator, b, solver, options)
    x, b = stopped((value, b))
    size = jnp.linalg.norm(b)
    residual = jnp.linalg.norm(stopped(operator).mv(x) - b) / jnp.where(size > 0, size, 1.0)
    # Iterations stop by their own tolerance; a pseudo-inverse leaves the part of the covector that no step can change.
    is_pseudo_inverse = "rank" in stats or (damped.is_undamped and not solver.assume_full_rank())
    is_accurate = jnp.array(True)
    if "num_steps" not in stats and not is_pseudo_inverse:
        is_accurate = residual <= jnp.finfo(b.dtype).eps ** 0.5
    return value, outcome(result, x, b, is_accurate), {**stats, "residual": residual}


def solve_traced(
    damped: DampedMetric,
    operator: lx.AbstractLinearOperator,
    b: Flat,
    solver: lx.AbstractLinearSolver,
    options: dict[str, Any],
) -> tuple[Flat, lx.RESULTS, dict]:
    """What `solver` computes, with the derivatives of lineax: of the equation, not of the way to its solution."""
    state = solver.init(stopped(damped), options)
    compute = lambda b: jax.tree.map(jnp.asarray, solver.compute(state, b, options))
    inverse = stopped(eqx.filter_closure_convert(compute, damped.in_structure()))
    traced = TracedSolver(solver.assume_full_rank())
    solution = lx.linear_solve(operator, b, traced, state=inverse, throw=False)
    return solution.value, solution.stats["result"], solution.stats["stats"]


def outcome(result: lx.RESULTS, x: Flat, b: Flat, is_accurate: Bool[Array, ""]) -> RESULTS:
    """What lineax and the residual say, in our words."""
    is_solved = (result == lx.RESULTS.successful) & is_accurate
    named = RESULTS.where(is_solved, RESULTS.successful, RESULTS.inaccurate)
    named = RESULTS.where(result == lx.RESULTS.max_steps_reached, RESULTS.max_steps_reached, named)
    is_finite = jnp.all(jnp.isfinite(x))
    named = RESULTS.where(is_finite & (result != lx.RESULTS.nonfinite_input), named, RESULTS.not_finite)
    # As lineax has it, a finite covector without a finite solution means a singular operator.
    is_unsolved = (result == lx.RESULTS.successful) & ~is_finite & jnp.all(jnp.isfinite(b))
    return RESULTS.where((result == lx.RESULTS.singular) | is_unsolved, RESULTS.not_positive_definite, named)


def stopped(tree: PyTree) -> PyTree:
    """A tree whose arrays are constant under differentiation."""
    arrays, rest = eqx.partition(tree, eqx.is_inexact_array)
    return eqx.combine(jax.lax.stop_gradient(arrays), rest)


@public
def natural_gradient(
    model: Callable | Point,
    geometry: AbstractGeometry | None = None,
    params: PyTree = None,
    x: PyTree = None,
    gradient: PyTree = None,
    *,
    damping: Any = 0.0,
    solver: lx.AbstractLinearSolver | None = None,
    has_aux: bool = False,
    check: bool = True,
) -> PyTree:
    r"""The natural gradient $(G + \lambda I)^{-1}g$ of any cost with gradient $g$.

    It is the direction that is steepest when steps are measured by how far they move the outputs of the model. Follow
    it downhill.

    Raises if the system could not be solved (a truncated `CG` counts as solved); use `pullback` and `solve` to decide
    for yourself. Can be differentiated like `solve`. `has_aux` and `check` are as for `pullback`; with a `Point` from
    `evaluate` in place of the model, `natural_gradient(point, gradient=...)`, there is no further forward pass.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng

    model, w = lambda w, x: x @ w, jnp.zeros(1)
    x, y = jnp.array([[1.0], [2.0]]), jnp.array([3.0, 6.0])
    gradient = jax.grad(lambda w: jnp.mean((model(w, x) - y) ** 2) / 2)(w)
    direction = ng.natural_gradient(model, ng.Euclidean(), w, x, gradient)
    assert jnp.allclose(w - direction, 3.0)  # one step solves linear least squares
    ```
    """
    if gradient is None:
        raise TypeError(f"{caller()} needs the `gradient` of a cost, a tree like the parameters, but got none.")
    metric = pullback(model, geometry, params, x, has_aux=has_aux, check=check)
    solution = solve(metric, gradient, damping=damping, solver=solver)
    return raise_failure(solution)


def raise_failure(solution: Solution) -> PyTree:
    """The value of a solution, unless it failed."""
    value, result = solution.value, solution.result
    failed = ~((result == RESULTS.successful) | (result == RESULTS.max_steps_reached))
    if is_concrete(failed):
        if bool(failed):
            raise RuntimeError(f"The natural gradient could not be computed. {RESULTS[result]}")
        return value
    return result.error_if(value, failed)
