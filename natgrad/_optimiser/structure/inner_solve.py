from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from natgrad import _tree
from natgrad._check import public
from natgrad._optimiser.cost import TermPoint
from natgrad._optimiser.info import STEP_RESULTS
from natgrad._optimiser.structure.base import AbstractStructure, Direction, check_batch_fraction
from natgrad._optimiser.structure.exact import sampled_mean_eigenvalue
from natgrad._types import Scalar


class InnerSolve(AbstractStructure):
    r"""Minimises the loss of the linearised model by a few steps of an optimiser of optax.

    $d \mapsto \ell(f(w) + J d)$, instead of solving with its quadratic approximation: Gauss-Newton without a matrix.
    The loss itself is kept, without a quadratic approximation. Few steps from $d = 0$ act like damping, so
    `NoDamping()` is the default.

    **Arguments:**

    - `optimiser`: optimiser of optax, initialised anew at every step, default `optax.adam(1e-2)`.
    - `num_steps`: number of its steps, default 20. Each costs one Jacobian-vector and one vector-Jacobian product.
    - `batch_fraction`: fraction of the batch that the linearised loss is measured on, default 1.0; other examples at
      every step. Its gradient at $d = 0$ is the gradient of the whole batch in any case.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng
    import optax

    x = jnp.array([[1.0], [2.0]])
    w, batch = jnp.zeros((1, 1)), (x, 3 * x)
    structure = ng.InnerSolve(optax.sgd(0.4), num_steps=3)
    opt = ng.NaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), structure, step=ng.ConstantStep(1.0))
    w, state, info = jax.jit(opt.step)(w, opt.init(w, batch), batch)
    assert jnp.allclose(w, 3.0)
    ```
    """

    optimiser: Any
    num_steps: int = eqx.field(static=True)
    batch_fraction: float = eqx.field(static=True)

    @public
    def __init__(self, optimiser: Any = None, num_steps: int = 20, *, batch_fraction: float = 1.0):
        self.optimiser = optax.adam(1e-2) if optimiser is None else optimiser
        self.num_steps, self.batch_fraction = num_steps, batch_fraction
        check_batch_fraction(self)
        if not (callable(getattr(self.optimiser, "init", None)) and callable(getattr(self.optimiser, "update", None))):
            raise TypeError(
                "`InnerSolve` needs an optimiser of optax, such as `optax.adam(1e-2)`, but got "
                f"`{type(self.optimiser).__name__}`."
            )
        if type(self.num_steps) is not int or self.num_steps < 1:
            raise ValueError(
                f"`InnerSolve` needs `num_steps` to be a whole number of at least 1, but got {self.num_steps}."
            )

    @property
    def is_damped(self):
        return False

    def init(self, points, key, damping):
        return ()

    def update(self, state, points, key, schedule, is_good):
        return state

    def mean_eigenvalue(self, state, points, key):
        return sampled_mean_eigenvalue(points, key)

    def direction(self, state, points, covector, damping):
        zero = jax.tree.map(jnp.zeros_like, covector)
        entries = _tree.flatten(zero)[1](jnp.broadcast_to(damping.entries(), _tree.size(zero)))

        def linearised(d):
            def loss(at: TermPoint) -> Scalar:
                return at.weight * at.batch_term.mean_loss(jax.tree.map(jnp.add, at.z, at.point.push(d)))

            return _tree.sum_leaves([loss(term_point) for term_point in points])

        # What the covector has beyond the gradient at the points: the rest of the batch, `l2`, others in a chain.
        tilt = _tree.subtract(covector, jax.grad(linearised)(zero))

        def objective(d):
            loss = linearised(d)
            added_term = _tree.vdot(d, jax.tree.map(lambda a, b: a.astype(b.dtype) * b, entries, d)) / 2
            return loss + (_tree.vdot(tilt, d) + added_term).astype(loss.dtype)

        # Line searches and the like ask for more than a gradient.
        optimiser = optax.with_extra_args_support(self.optimiser)

        def step(carry, _):
            d, memory = carry
            value, gradient = jax.value_and_grad(objective)(d)
            updates, memory = optimiser.update(gradient, memory, d, value=value, grad=gradient, value_fn=objective)
            return (optax.apply_updates(d, updates), memory), None

        (d, _), _ = jax.lax.scan(step, (zero, optimiser.init(zero)), length=self.num_steps)
        results: Any = STEP_RESULTS
        is_lower = objective(d) <= objective(zero)
        result = results.where(is_lower, results.successful, results.inner_diverged)
        # A direction that is not finite is not taken.
        vector = jax.tree.map(lambda leaf: jnp.where(is_lower, -leaf, jnp.nan), d)
        return Direction(vector, result, jnp.array(0)), state

    def check(self, damping):
        if damping.is_relative:
            raise ValueError(
                '`InnerSolve` forms no metric, and cannot be damped relative to its diagonal. Use `shape="identity"`.'
            )
