"""Results of a solve, and the damped metric that solvers get."""

from abc import abstractmethod
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import Array, Bool, Float, PyTree

from natgrad import _tree
from natgrad._check import caller, check_damping, public, real_array
from natgrad._metric.base import AbstractMetric
from natgrad._types import Scalar

Flat: TypeAlias = Float[Array, " P"]


class RESULTS(eqx.Enumeration):
    """Outcomes of a solve. `RESULTS[result]` is a message with likely causes and fixes.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    saddle = ng.hessian(lambda w: w[0] ** 2 - w[1] ** 2, jnp.zeros(2))
    solution = ng.solve(saddle, jnp.ones(2), solver=ng.CG())
    assert solution.result == ng.RESULTS.not_positive_definite
    print(ng.RESULTS[solution.result])
    ```
    """

    successful = "The system was solved."
    max_steps_reached = (
        "The iteration stopped at `max_steps` before the residual fell below `rtol`. The value is the best so far: a "
        "descent direction for a positive definite metric, but not the solution. Allow more steps, raise the damping, "
        "or give a preconditioner."
    )
    not_positive_definite = (
        "The metric plus damping is not positive definite. Likely causes: (a) the damping is zero or too small for a "
        "metric with redundant parameters: raise it, or use `PseudoInverse`; (b) the operator is a Hessian with "
        "negative curvature: use `gauss_newton` or `pullback`; (c) single precision is too little for its condition "
        "number: use float64; (d) the metric has NaN or infinity: look for these in the parameters and the data."
    )
    inaccurate = (
        "The solution leaves a residual far above rounding. Likely causes: (a) the damping is tiny next to the metric: "
        "raise it, or pass `SampleSpace(cotangents=...)`; (b) single precision is too little for the condition number: "
        "use float64."
    )
    not_finite = (
        "The solution is not finite. Likely causes: NaN or infinity in the covector, the parameters or the data, or an "
        "overflow in the model."
    )


class Solution(eqx.Module):
    """Result of `natgrad.solve`.

    **Attributes:**

    - `value`: the solution, a tree like the parameters; a `Vector` if the right-hand side was a `Covector`.
    - `result`: a member of `natgrad.RESULTS`; its text says what happened.
    - `stats`: dictionary with the relative `residual`, and `num_steps` (`CG`), `rank` (`PseudoInverse`) or `rows`
      (`SampleSpace`).
    - `solver`: name of the solver, and why `Auto` chose it.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    solution = ng.solve(ng.hessian(lambda w: w @ w, jnp.zeros(2)), jnp.ones(2), solver=ng.Cholesky())
    assert jnp.allclose(solution.value, 0.5)
    assert solution.result == ng.RESULTS.successful and solution.stats["residual"] < 1e-6
    ```
    """

    value: PyTree
    result: RESULTS
    stats: dict
    solver: str = eqx.field(static=True)


class DampedMetric(AbstractMetric):
    r"""$G + \lambda I$ as an operator on flat vectors: what a solver is given.

    **Arguments:**

    - `metric`: $G$, a metric or another symmetric operator of lineax.
    - `damping`: $\lambda \ge 0$. May be traced, and differentiated.
    - `dtype`: of the vectors, by default the widest of the parameters.

    `unflatten` turns a flat vector into a tree like the parameters. `is_undamped` says whether the damping was known to
    be zero when the operator was made.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    operator = ng.DampedMetric(ng.DiagonalMetric({"w": jnp.array([1.0, 4.0])}), damping=0.5)
    assert jnp.allclose(operator.as_matrix(), jnp.diag(jnp.array([1.5, 4.5])))
    ```
    """

    metric: lx.AbstractLinearOperator
    damping: Scalar
    dtype: Any = eqx.field(static=True)
    is_undamped: bool = eqx.field(static=True)

    @public
    def __init__(self, metric: lx.AbstractLinearOperator, damping: Any = 0.0, dtype: Any = None):
        self.metric = metric
        flat = jax.eval_shape(lambda tree: _tree.flatten(tree)[0], metric.in_structure())
        self.dtype = flat.dtype if dtype is None else dtype
        self.is_undamped = check_damping(damping)
        self.damping = real_array(damping, f"{caller()}: `damping`", self.dtype)

    def _mv(self, v):
        return _tree.flatten(self.metric.mv(self.unflatten(v)))[0].astype(v.dtype) + self.damping * v

    def as_matrix(self):
        matrix = self.metric.as_matrix().astype(self.dtype)
        return matrix + self.damping * jnp.eye(len(matrix), dtype=self.dtype)

    def diagonal(self):
        return lx.diagonal(self.metric).astype(self.dtype) + self.damping

    def unflatten(self, v: Flat) -> PyTree:
        return _tree.unflatten_like(self.metric.in_structure())(v)

    @property
    def is_semidefinite(self):
        return lx.is_positive_semidefinite(self.metric)

    @property
    def is_diagonal(self):
        return lx.is_diagonal(self.metric)

    @property
    def is_traceable(self):
        return self.metric.is_traceable if isinstance(self.metric, AbstractMetric) else True

    def in_structure(self):
        return jax.ShapeDtypeStruct((self.metric.in_size(),), self.dtype)


class AbstractSolver(lx.AbstractLinearSolver):
    """A solver of lineax whose operator is a `DampedMetric`.

    A metric that is not positive definite is reported as `lineax.RESULTS.singular`."""

    @abstractmethod
    def init(self, operator: Any, options: dict[str, Any]) -> Any: ...

    def transpose(self, state: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return state, options

    def conj(self, state: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return state, options


def success_if(is_definite: Bool[Array, ""]) -> lx.RESULTS:
    return lx.RESULTS.where(is_definite, lx.RESULTS.successful, lx.RESULTS.singular)
