import jax
import jax.numpy as jnp

from natgrad._solve.base import AbstractSolver, System, accurate
from natgrad._solve.result import RESULTS


class Cholesky(AbstractSolver):
    """The dense matrix, factorised. For up to some thousands of parameters; needs damping where parameters are
    redundant."""

    def compute(self, system: System):
        root = jnp.linalg.cholesky(system.matrix())
        value = jax.scipy.linalg.cho_solve((root, True), system.covector)
        definite = jnp.all(jnp.isfinite(root))
        return value, RESULTS.where(definite, accurate(system, value), RESULTS.not_positive_definite), {}
