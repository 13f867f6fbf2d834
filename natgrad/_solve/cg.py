from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lineax as lx
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._solve.base import AbstractSolver, DampedMetric, Flat
from natgrad._vector import Vector, untyped


class CG(AbstractSolver):
    """Conjugate gradients: products only, no matrix.

    **Arguments:**

    - `rtol`: stop when the residual is this small relative to the covector.
    - `max_steps`: stop after so many steps (truncated solve), by default ten times the number of parameters. The
      outcome says which of the two happened.
    - `preconditioner`: an operator (or a function of trees) close to the inverse of the damped metric, symmetric
      and positive definite.
    - `initial`: where to start from, such as the previous solution.

    Stops at the first direction of negative or zero curvature and reports it.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    metric = ng.hessian(lambda w: w[0] ** 2 + 2 * w[1] ** 2, jnp.zeros(2))
    solution = ng.solve(metric, jnp.ones(2), solver=ng.CG(rtol=1e-5))
    assert jnp.allclose(solution.value, jnp.array([0.5, 0.25])) and solution.stats["num_steps"] == 2
    ```
    """

    rtol: float = 1e-6
    max_steps: int | None = None
    preconditioner: Any = None
    initial: PyTree = None

    def __check_init__(self):
        if self.max_steps is not None and self.max_steps < 1:
            raise ValueError(f"`CG` needs `max_steps` of at least 1, but got {self.max_steps}.")

    def init(self, operator, options):
        return operator

    def compute(self, state, vector, options):
        operator, b = state, vector
        precondition = self._preconditioner(operator)
        target = self.rtol * jnp.linalg.norm(b)
        max_steps = 10 * b.size if self.max_steps is None else self.max_steps

        start, r = jnp.zeros_like(b), b
        if self.initial is not None:
            initial = _tree.flatten(untyped(self.initial, Vector)[0])[0].astype(b.dtype)
            # A derivative is a solve for another covector, for which `initial` is no better than zero.
            is_asked = jnp.all(b == options.get("covector", b))
            start, r = jnp.where(is_asked, initial, start), jnp.where(is_asked, b - operator.mv(initial), b)
        z = precondition(r)

        def unfinished(carry):
            step, _, r, _, _, is_curved = carry
            return (jnp.linalg.norm(r) > target) & (step < max_steps) & is_curved

        def advance(carry):
            step, x, r, p, rz, _ = carry
            product = operator.mv(p)
            curvature = jnp.vdot(p, product)
            is_curved = curvature > 0
            length = jnp.where(is_curved, rz / jnp.where(is_curved, curvature, 1.0), 0.0)
            x, r = x + length * p, r - length * product
            z = precondition(r)
            new_rz = jnp.vdot(r, z)
            return step + 1, x, r, z + new_rz / jnp.where(rz == 0, 1.0, rz) * p, new_rz, is_curved

        loop = jax.lax.while_loop if operator.is_traceable else python_while_loop
        steps, x, r, _, _, is_curved = loop(
            unfinished, advance, (jnp.array(0), start, r, z, jnp.vdot(r, z), jnp.array(True))
        )
        outcomes = lx.RESULTS
        result = outcomes.where(jnp.linalg.norm(r) <= target, outcomes.successful, outcomes.max_steps_reached)
        return x, outcomes.where(is_curved, result, outcomes.singular), {"num_steps": steps}

    def assume_full_rank(self):
        return True

    def _preconditioner(self, operator: DampedMetric) -> Callable[[Flat], Flat]:
        if self.preconditioner is None:
            return lambda r: r
        apply = getattr(self.preconditioner, "mv", self.preconditioner)
        return lambda r: _tree.flatten(apply(operator.unflatten(r)))[0].astype(r.dtype)


def python_while_loop(condition: Callable, body: Callable, state: Any) -> Any:
    while condition(state):
        state = body(state)
    return state
