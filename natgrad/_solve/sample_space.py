import jax.numpy as jnp
from jaxtyping import PyTree

from natgrad import _linalg, _tree
from natgrad._metric.base import AbstractMetric
from natgrad._metric.pullback import PullbackMetric
from natgrad._solve.base import AbstractSolver, success_if


class SampleSpace(AbstractSolver):
    r"""Solves in the space of samples instead of parameters (Woodbury).

    By $R$ with $G = R^\top R$: $(G + \lambda I)^{-1}g = \frac1\lambda\big(g - R^\top(R R^\top + \lambda I)^{-1}R
    g\big)$.

    The matrix to factorise has as many rows as the batch has examples times output columns, whatever the number of
    parameters. Needs damping. The formula subtracts nearly equal vectors when the damping is tiny next to the
    metric; one step of refinement wins the digits back until damping meets rounding. If the covector is the gradient
    $\frac1N\sum_i J_i^\top r_i$ of a mean loss, pass the gradients $r_i$ of the
    examples' losses in their outputs as `cotangents`: with $g = R^\top a$ the solution is
    $R^\top(R R^\top + \lambda I)^{-1}a$, which loses nothing.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[3.0, 4.0]])  # one example, so the system has one row
    metric = ng.pullback(lambda w, x: x @ w, ng.Euclidean(), jnp.zeros(2), x)
    solution = ng.solve(metric, x[0], damping=1.0, solver=ng.SampleSpace())
    assert jnp.allclose(solution.value, x[0] / 26) and solution.stats["rows"] == 1
    ```
    """

    cotangents: PyTree = None

    def init(self, operator, options):
        metric = operator.metric
        if not isinstance(metric, AbstractMetric):
            raise TypeError(f"`SampleSpace` needs a natgrad metric, but got `{type(metric).__name__}`. Use `CG`.")
        if self.cotangents is not None and not isinstance(metric, PullbackMetric):
            raise TypeError("`SampleSpace(cotangents=...)` needs the metric of one model, not a combination.")
        if operator.is_undamped:
            raise ValueError(
                "`SampleSpace` needs `damping` above 0, but got 0. Use `PseudoInverse` for a limit without."
            )
        gram = metric.root_gram()
        return operator, _linalg.cholesky(gram + operator.damping * jnp.eye(len(gram), dtype=gram.dtype))

    def compute(self, state, vector, options):
        operator, root = state
        metric, g = operator.metric, vector

        def pull(u):
            return _tree.flatten(metric.root_transpose_mv(u))[0]

        def solve(u):
            return _linalg.cholesky_solve(root, u[:, None])[:, 0]

        def woodbury(g):
            return (g - pull(solve(metric.root_mv(operator.unflatten(g))))) / operator.damping

        value = woodbury(g)
        if self.cotangents is not None:
            coordinates = metric.root_coordinates(self.cotangents).astype(g.dtype)
            mismatch = jnp.linalg.norm(pull(coordinates) - g)
            met = mismatch <= jnp.finfo(g.dtype).eps ** 0.5 * jnp.linalg.norm(g)
            value = jnp.where(met, pull(solve(coordinates)), value)
        # One step of iterative refinement wins back most of what the subtraction lost.
        value = value + woodbury(g - operator.mv(value))
        return value, success_if(jnp.all(jnp.isfinite(root))), {"rows": len(root)}

    def assume_full_rank(self):
        return True
