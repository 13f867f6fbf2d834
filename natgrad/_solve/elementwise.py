import jax.numpy as jnp

from natgrad import _tree
from natgrad._metric.base import AbstractMetric
from natgrad._solve.base import AbstractSolver, System
from natgrad._solve.result import RESULTS


class Elementwise(AbstractSolver):
    """One division an entry, for diagonal metrics, their sums, multiples and restrictions.

    Without damping it is the pseudo-inverse: where an entry of the metric is zero the solution is zero, and the
    residual is the part of the covector that no step can change."""

    def compute(self, system: System):
        metric = system.operator
        if not (isinstance(metric, AbstractMetric) and metric.is_diagonal):
            raise TypeError(f"`Elementwise` needs a diagonal metric, but got `{type(metric).__name__}`. Use `Auto`.")
        entries = _tree.flatten(metric.diagonal())[0].astype(system.covector.dtype) + system.damping
        is_zero = entries == 0
        value = jnp.where(is_zero, 0.0, system.covector / jnp.where(is_zero, 1.0, entries))
        result = RESULTS.where(jnp.all(entries >= 0), RESULTS.successful, RESULTS.not_positive_definite)
        return value, result, {"rank": jnp.sum(~is_zero)}
