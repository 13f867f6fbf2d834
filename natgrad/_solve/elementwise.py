import jax.numpy as jnp

from natgrad import _tree
from natgrad._metric.diagonal import DiagonalMetric
from natgrad._solve.base import AbstractSolver, System, accurate


class Elementwise(AbstractSolver):
    """One division an entry, for diagonal metrics. Entries of zero stay where they are if there is no damping."""

    def compute(self, system: System):
        if not isinstance(system.operator, DiagonalMetric):
            raise TypeError(f"`Elementwise` needs a diagonal metric, but got `{type(system.operator).__name__}`.")
        entries = _tree.flatten(system.operator.entries)[0].astype(system.covector.dtype) + system.damping
        positive = entries > 0
        value = jnp.where(positive, system.covector / jnp.where(positive, entries, 1.0), 0.0)
        return value, accurate(system, value), {"rank": jnp.sum(positive)}
