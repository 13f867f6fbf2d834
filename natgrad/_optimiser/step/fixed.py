"""Steps of a given length: by a learning rate, and by a bound on the divergence (KL clipping)."""

from typing import Any

import jax.numpy as jnp

from natgrad._check import check_number, number, public
from natgrad._optimiser.momentum import HeavyBall
from natgrad._optimiser.step.base import AbstractStep, Proposal, dot, scheduled


class ConstantStep(AbstractStep):
    """A given multiple of the natural gradient: a number, or a schedule from optax.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0], [2.0]])
    w, batch = jnp.zeros((1, 1)), (x, 3 * x)
    opt = ng.NaturalGradient(
        lambda w, x: x @ w, ng.LeastSquares(), ng.Exact(), ng.NoDamping(), step=ng.ConstantStep(0.5)
    )
    w, state, info = jax.jit(opt.step)(w, opt.init(w, batch), batch)
    assert jnp.allclose(w, 1.5)  # half of the way to the solution
    ```
    """

    learning_rate: Any = number(1.0)

    @public
    def __check_init__(self):
        check_number(self.learning_rate, "`learning_rate`", above=0, schedules=True)

    def propose(self, expansion, search):
        rate = scheduled(self.learning_rate, expansion.steps)
        return Proposal(search.update(rate, search.momentum), rate, search.momentum)

    @property
    def keeps_learning_rate(self):
        return True

    @property
    def keeps_damping(self):
        return True


class KLClip(AbstractStep):
    r"""A given multiple $\alpha$ of the natural gradient $d$, made shorter where it would move the outputs too far.

    The factor is $\min\big(1, \sqrt{2r / (\alpha^2\, d^\top(G + D)\,d)}\big)$, which costs nothing since $d^\top(G +
    D)\,d = -g^\top d$.

    **Arguments:**

    - `radius`: $r$, in units of $\frac12 d^\top G d$, for small steps the divergence of the outputs.
    - `learning_rate`: $\alpha$, a number or a schedule from optax.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0], [2.0]])
    w, batch = jnp.zeros((1, 1)), (x, 3 * x)
    opt = ng.NaturalGradient(
        lambda w, x: x @ w, ng.LeastSquares(), ng.Exact(), ng.NoDamping(), step=ng.KLClip(radius=0.2)
    )
    w, state, info = jax.jit(opt.step)(w, opt.init(w, batch), batch)
    assert jnp.allclose(2.5 * jnp.sum(w**2) / 2, 0.2)  # the outputs moved by the radius
    ```
    """

    radius: Any = number(3e-4)
    learning_rate: Any = number(1.0)

    @public
    def __check_init__(self):
        for name, value in (("radius", self.radius), ("learning_rate", self.learning_rate)):
            check_number(value, f"`{name}`", above=0, schedules=True)

    def propose(self, expansion, search):
        rate, radius = scheduled(self.learning_rate, expansion.steps), scheduled(self.radius, expansion.steps)
        squared = jnp.maximum(-dot(expansion.gradient, search.natural), 0.0)
        half = rate**2 * squared / 2
        clip = jnp.where(half > radius, jnp.sqrt(radius / jnp.where(half > 0, half, 1.0)), 1.0)
        update = search.update(rate * clip, search.momentum)
        return Proposal(update, rate * clip, search.momentum)

    @property
    def momentum(self):
        return HeavyBall(0.9)

    @property
    def keeps_learning_rate(self):
        return True

    @property
    def keeps_damping(self):
        return True
