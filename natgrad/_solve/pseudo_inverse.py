import jax.numpy as jnp

from natgrad import _linalg
from natgrad._solve.base import AbstractSolver, System
from natgrad._solve.result import RESULTS


class PseudoInverse(AbstractSolver):
    r"""The Moore-Penrose pseudo-inverse of the dense matrix: the least-squares solution of least norm, for metrics of
    any rank.

    Eigenvalues below `rtol` times the largest (in size) count as zero; `None` means the number of parameters times the
    machine epsilon, as in NumPy. The rank that was found is in `stats`. Without damping and outside the range of
    the metric, the residual is the part of the covector that no step can change."""

    rtol: float | None = None

    def compute(self, system: System):
        values, vectors = _linalg.eigh(system.matrix())
        rtol = values.size * jnp.finfo(values.dtype).eps if self.rtol is None else self.rtol
        keep = jnp.abs(values) > rtol * jnp.max(jnp.abs(values), initial=0.0)
        inverse = jnp.where(keep, 1 / jnp.where(keep, values, 1.0), 0.0)
        value = vectors @ (inverse * (vectors.T @ system.covector))
        semidefinite = jnp.all(jnp.where(keep, values, 1.0) > 0)
        result = RESULTS.where(semidefinite, RESULTS.successful, RESULTS.not_positive_definite)
        return value, result, {"rank": jnp.sum(keep)}
