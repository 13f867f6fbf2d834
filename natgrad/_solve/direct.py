"""Direct solvers: Cholesky factors or eigenvalues of the whole matrix, division by the diagonal, inverses of blocks."""

import jax.numpy as jnp
import lineax as lx

from natgrad import _linalg, _tree
from natgrad._metric.block_metric import BlockMetric
from natgrad._solve.base import AbstractSolver, success_if


class Cholesky(AbstractSolver):
    """The Cholesky factorisation of the dense matrix.

    For up to some thousands of parameters; needs damping where parameters are redundant.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    metric = ng.hessian(lambda w: w[0] ** 2 + w[0] * w[1] + w[1] ** 2, jnp.zeros(2))
    solution = ng.solve(metric, jnp.ones(2), damping=1.0, solver=ng.Cholesky())
    assert jnp.allclose(solution.value, 0.25)
    ```
    """

    def init(self, operator, options):
        return _linalg.cholesky(operator.as_matrix())

    def compute(self, state, vector, options):
        value = _linalg.cholesky_solve(state, vector[:, None])[:, 0]
        return value, success_if(jnp.all(jnp.isfinite(state))), {}

    def assume_full_rank(self):
        return True


class PseudoInverse(AbstractSolver):
    r"""The Moore-Penrose pseudo-inverse of the dense matrix, for metrics of any rank.

    The solution is the least-squares solution of least norm.

    Eigenvalues below `rtol` times the largest (in size) count as zero; `None` means the number of parameters times the
    machine epsilon, as in NumPy. The rank that was found is in `stats`. Without damping and outside the range of
    the metric, the residual is the part of the covector that no step can change.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    metric = ng.hessian(lambda w: (w[0] + w[1]) ** 2, jnp.zeros(2))  # depends on the sum only
    solution = ng.solve(metric, jnp.array([2.0, 2.0]), solver=ng.PseudoInverse())
    assert jnp.allclose(solution.value, 0.5) and solution.stats["rank"] == 1
    ```
    """

    rtol: float | None = None

    def init(self, operator, options):
        return _linalg.eigh(operator.as_matrix())

    def compute(self, state, vector, options):
        values, vectors = state
        rtol = values.size * jnp.finfo(values.dtype).eps if self.rtol is None else self.rtol
        keep = jnp.abs(values) > rtol * jnp.max(jnp.abs(values), initial=0.0)
        inverse = jnp.where(keep, 1 / jnp.where(keep, values, 1.0), 0.0)
        value = vectors @ (inverse * (vectors.T @ vector))
        is_semidefinite = jnp.all(jnp.where(keep, values, 1.0) > 0)
        return value, success_if(is_semidefinite), {"rank": jnp.sum(keep)}

    def assume_full_rank(self):
        return False


class Elementwise(AbstractSolver):
    """One division an entry, for diagonal metrics, their sums, multiples and restrictions.

    Without damping it is the pseudo-inverse: where an entry of the metric is zero the solution is zero, and the
    residual is the part of the covector that no step can change."""

    def init(self, operator, options):
        if not operator.is_diagonal:
            kind = type(operator.metric).__name__
            raise TypeError(f"`Elementwise` needs a diagonal metric, but got `{kind}`. Use `Auto`.")
        return operator.diagonal()

    def compute(self, state, vector, options):
        is_zero = state == 0
        value = jnp.where(is_zero, 0.0, vector / jnp.where(is_zero, 1.0, state))
        return value, success_if(jnp.all(state >= 0)), {"rank": jnp.sum(~is_zero)}

    def assume_full_rank(self):
        return False


class Blockwise(AbstractSolver):
    """Block by block, for metrics made of blocks (`kfac`, `ekfac`): the dense solution, at the cost of decomposing the
    factors.

    Damping is added to the blocks, not to their factors; for that, use `BlockMetric.inverse(damping, factored=True)`.
    Without damping it is the pseudo-inverse of every block, and the residual is the part of the covector that no step
    can change."""

    def init(self, operator, options):
        if not isinstance(operator.metric, BlockMetric):
            kind = type(operator.metric).__name__
            raise TypeError(f"`Blockwise` needs a metric made of blocks, but got `{kind}`. Use `Auto`.")
        return operator.metric.inverse(0.0 if operator.is_undamped else operator.damping), operator

    def compute(self, state, vector, options):
        inverse, operator = state
        value = _tree.flatten(inverse.mv(operator.unflatten(vector)))[0].astype(vector.dtype)
        outcomes = lx.RESULTS
        return value, outcomes.where(inverse.failures == 0, outcomes.successful, outcomes.nonfinite_input), {}

    def assume_full_rank(self):
        return False
