from collections.abc import Sequence
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._check import public
from natgrad._metric.base import AbstractMetric, SumMetric
from natgrad._metric.output import ExactOutputMetric
from natgrad._metric.pullback import PullbackMetric
from natgrad._metric.rescaled import RescaledMetric
from natgrad._optimiser.cost import TermPoint
from natgrad._optimiser.damping import DampingMatrix
from natgrad._optimiser.info import STEP_RESULTS
from natgrad._optimiser.structure.base import AbstractStructure, Direction, check_batch_fraction, over_live
from natgrad._solve.cg import CG
from natgrad._solve.solve import Auto, solve
from natgrad._types import Key, Scalar


class ExactState(NamedTuple):
    """The last solution, from which conjugate gradients start."""

    last: PyTree


class Exact(AbstractStructure):
    """The exact metric of every batch, never formed unless the solver forms it; nothing is averaged over steps.

    **Arguments:**

    - `solver`: `CG()`, which starts from the last solution, `SampleSpace()`, `Cholesky()`, `PseudoInverse()`, or any
      solver of lineax; by default `Auto()`, which picks by sizes.
    - `batch_fraction`: fraction of the batch that the metric is measured on, default 1.0; other examples at every step.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0], [2.0]])
    w, batch = jnp.zeros((1, 1)), (x, 3 * x)
    structure, damping, step = ng.Exact(solver=ng.CG(max_steps=20)), ng.ConstantDamping(0.5), ng.ConstantStep(1.0)
    opt = ng.NaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), structure, damping, step=step)
    w, state, info = jax.jit(opt.step)(w, opt.init(w, batch), batch)
    assert jnp.allclose(w, 7.5 / 3)  # the gradient over the metric of 2.5 with damping
    ```
    """

    solver: lx.AbstractLinearSolver
    batch_fraction: float = eqx.field(static=True)

    @public
    def __init__(self, solver: lx.AbstractLinearSolver | None = None, *, batch_fraction: float = 1.0):
        self.solver = Auto() if solver is None else solver
        self.batch_fraction = batch_fraction
        check_batch_fraction(self)
        if not isinstance(self.solver, lx.AbstractLinearSolver):
            raise TypeError(f"`Exact` needs a solver, such as `CG()`, but got `{type(self.solver).__name__}`.")

    def init(self, points, key, damping):
        return ExactState(points[0].point.params if isinstance(self.solver, CG) else None)

    def update(self, state, points, key, schedule, is_good):
        return state

    def mean_eigenvalue(self, state, points, key):
        return sampled_mean_eigenvalue(points, key)

    def direction(self, state, points, covector, damping):
        metric = metric_of(points)
        scales = self._scales(metric, damping)
        if scales is not None:
            metric = RescaledMetric(metric, scales)
        inside = metric.scaled if isinstance(metric, RescaledMetric) else lambda tree: tree
        solver = self.solver
        if isinstance(solver, CG):
            solver = eqx.tree_at(lambda cg: cg.initial, solver, state.last, is_leaf=lambda leaf: leaf is None)
        strength = 1.0 if scales is not None else damping.of_leaf(0)
        solution = solve(metric, inside(covector), damping=strength, solver=solver)
        result = STEP_RESULTS.promote(solution.result)
        is_finite = jnp.isfinite(_tree.vdot(solution.value, solution.value))
        kept = jax.tree.map(lambda leaf: jnp.where(is_finite, leaf, 0.0), solution.value)
        state = ExactState(None if state.last is None else kept)
        return Direction(inside(solution.value), result, jnp.array(0)), state

    def diagonal(self, state, points):
        return metric_of(points).diagonal()

    def _scales(self, metric: AbstractMetric, damping: DampingMatrix) -> PyTree | None:
        """The units in which what is added is the identity, unless it is a multiple of it already."""
        if damping.is_uniform:
            return None
        flat, unflatten = _tree.flatten(metric._zeros())
        diagonal = _tree.flatten(metric.diagonal())[0] if damping.is_relative else None
        entries = jnp.broadcast_to(damping.entries(diagonal), flat.shape)
        return unflatten(jnp.where(entries > 0, jax.lax.rsqrt(jnp.where(entries > 0, entries, 1.0)), 0.0))


def sampled_mean_eigenvalue(points: Sequence[TermPoint], key: Key | None) -> Scalar:
    """From one sample, whose squared length has the trace for its mean."""
    draw = _tree.flatten(metric_of(points).sample(jax.random.key(0) if key is None else key))[0]
    return over_live(jnp.sum(draw**2), draw**2)


def metric_of(points: Sequence[TermPoint]) -> AbstractMetric:
    """The exact metric of all terms."""
    metrics = []
    for term_point in points:
        metrics.append((term_point.weight, PullbackMetric(term_point.point, ExactOutputMetric())))
    scaled = [metric if isinstance(w, int | float) and w == 1 else w * metric for w, metric in metrics]
    return scaled[0] if len(scaled) == 1 else SumMetric(tuple(scaled))
