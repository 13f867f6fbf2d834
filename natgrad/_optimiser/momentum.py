"""What is kept of the last update."""

from typing import Any

import equinox as eqx
from jaxtyping import Array, Float, Int

from natgrad._check import check_number, number, public

Flat = Float[Array, " P"]


class AbstractMomentum(eqx.Module):
    """How the last update enters the next one: before the solve by `covector`, after it by `coefficient`.

    ```python
    import jax.numpy as jnp
    import natgrad as ng


    class Nesterov(ng.AbstractMomentum):
        # The momentum $t / (t + 3)$ of accelerated gradients.

        def coefficient(self, steps):
            return steps / (steps + 3)


    opt = ng.NaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), step=ng.ConstantStep(0.1), momentum=Nesterov())
    assert jnp.allclose(opt.momentum.coefficient(jnp.array(3)), 0.5)
    ```
    """

    def covector(self, gradient: Flat, last: Flat | None, damping: Any) -> Flat:
        """What the metric is solved for, given what damping adds to every entry of its diagonal."""
        del last, damping
        return gradient

    def coefficient(self, steps: Int[Array, ""]) -> Any:
        """By how much the last update is added to the new one, after so many steps; `None` if the step rule is to find
        it."""
        del steps
        return 0.0

    @property
    def uses_last(self) -> bool:
        """Whether the last update is to be stored."""
        return True


class NoMomentum(AbstractMomentum):
    """Every step stands for itself.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    opt = ng.NaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), momentum=ng.NoMomentum())
    w, batch = jnp.zeros((1, 1)), (jnp.ones((2, 1)), jnp.ones((2, 1)))
    assert opt.init(w, batch).last is None  # no copy of the last update is stored
    ```
    """

    @property
    def uses_last(self):
        return False


class HeavyBall(AbstractMomentum):
    r"""The last update is added again, times `decay`: a number or a schedule from optax; default 0.9.

    With `None` the step rule finds the factor, which `QuadraticModel` can.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    model, step = lambda w, x: x @ w, ng.ConstantStep(0.1)
    opt = ng.NaturalGradient(model, ng.LeastSquares(), step=step, momentum=ng.HeavyBall(0.9))
    assert jnp.allclose(opt.momentum.coefficient(jnp.array(0)), 0.9)
    ```
    """

    decay: Any = number(0.9)

    @public
    def __check_init__(self):
        if self.decay is not None:
            check_number(self.decay, "`decay`", least=0, below=1, schedules=True)

    def coefficient(self, steps):
        return self.decay(steps) if callable(self.decay) else self.decay


class Spring(AbstractMomentum):
    r"""Repeats the last update, times `decay` (default 0.99), where the batch says nothing (SPRING).

    $d = \mu d' - (G + \lambda I)^{-1}(g + G \mu d')$, which is $-(G + \lambda I)^{-1}(g - \lambda\mu d')$.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0, 0.0]])  # one example, which says nothing about the second weight
    w, batch = jnp.zeros(2), (x, jnp.ones(1))
    spring, damping = ng.Spring(0.9), ng.ConstantDamping(0.1)
    opt = ng.NaturalGradient(
        lambda w, x: x @ w, ng.LeastSquares(), ng.Exact(), damping, step=ng.ConstantStep(1.0), momentum=spring
    )
    state = opt.init(w, batch).replace(last=jnp.ones(2))
    after, state, info = jax.jit(opt.step)(w, state, batch)
    assert jnp.allclose(after[1], 0.9)  # so there the last update is repeated, times the decay
    ```
    """

    decay: Any = number(0.99)

    @public
    def __check_init__(self):
        check_number(self.decay, "`decay`", least=0, below=1)

    def covector(self, gradient, last, damping):
        assert last is not None
        return gradient - (self.decay * damping * last).astype(gradient.dtype)
