"""Direct solvers: Cholesky factors or eigenvalues of the whole matrix, division by the diagonal, inverses of blocks."""

import jax.numpy as jnp

from natgrad import _linalg, _tree
from natgrad._metric.base import AbstractMetric
from natgrad._metric.block_metric import BlockMetric
from natgrad._solve.base import RESULTS, AbstractSolver, System, accurate


class Cholesky(AbstractSolver):
    """The dense matrix, factorised. For up to some thousands of parameters; needs damping where parameters are
    redundant."""

    def compute(self, system: System):
        root = _linalg.cholesky(system.matrix())
        value = _linalg.cholesky_solve(root, system.covector[:, None])[:, 0]
        definite = jnp.all(jnp.isfinite(root))
        return value, RESULTS.where(definite, accurate(system, value), RESULTS.not_positive_definite), {}


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


class Blockwise(AbstractSolver):
    """Block by block, for metrics made of blocks (`kfac`, `ekfac`): the dense solution, at the cost of decomposing the
    factors.

    Damping is added to the blocks, not to their factors; for that, use `BlockMetric.inverse(damping, factored=True)`.
    Without damping it is the pseudo-inverse of every block, and the residual is the part of the covector that no step
    can change."""

    def compute(self, system: System):
        metric = system.operator
        if not isinstance(metric, BlockMetric):
            raise TypeError(
                f"`Blockwise` needs a metric made of blocks, but got `{type(metric).__name__}`. Use `Auto`."
            )
        inverse = metric.inverse(0.0 if system.is_undamped else system.damping)
        value = _tree.flatten(inverse.mv(system.unflatten(system.covector)))[0].astype(system.covector.dtype)
        solved = RESULTS.successful if system.is_undamped else accurate(system, value)
        return value, RESULTS.where(inverse.failures == 0, solved, RESULTS.not_finite), {}
