import jax.numpy as jnp

from natgrad import _linalg
from natgrad._solve.base import AbstractSolver, System, accurate
from natgrad._solve.result import RESULTS


class Cholesky(AbstractSolver):
    """The dense matrix, factorised. For up to some thousands of parameters; needs damping where parameters are
    redundant."""

    def compute(self, system: System):
        root = _linalg.cholesky(system.matrix())
        value = _linalg.cholesky_solve(root, system.covector[:, None])[:, 0]
        definite = jnp.all(jnp.isfinite(root))
        return value, RESULTS.where(definite, accurate(system, value), RESULTS.not_positive_definite), {}
