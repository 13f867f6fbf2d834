"""Steps whose length is searched for: trust region and line searches."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad._check import check_number, is_concrete, number, public
from natgrad._optimiser.step.base import AbstractStep, Proposal, dot, scheduled


class TrustRegion(AbstractStep):
    r"""The longest step along the natural gradient that moves the outputs by at most `radius`.

    Up to `learning_rate` of the natural gradient, with the outputs measured by the true divergence, not only by its
    quadratic model; and the step does not raise the loss.

    The first guess is that of the quadratic model; it is made shorter by `shrink` until it fits, at most `max_tries`
    times, each for two forward passes. `info` has the divergence that was achieved next to that predicted.

    **Arguments:**

    - `radius`: in the units of the geometry, which for small steps are $\frac12 d^\top G d$.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0], [2.0]])
    w, batch = jnp.zeros((1, 1)), (x, 3 * x)
    opt = ng.NaturalGradient(
        lambda w, x: x @ w, ng.LeastSquares(), ng.Exact(), ng.NoDamping(), step=ng.TrustRegion(radius=0.2)
    )
    w, state, info = jax.jit(opt.step)(w, opt.init(w, batch), batch)
    assert jnp.allclose(float(info.divergence), 0.2)
    ```
    """

    radius: Any = number(1e-2)
    learning_rate: Any = number(1.0)
    shrink: Any = number(0.5)
    max_tries: int = eqx.field(default=10, static=True)

    @public
    def __check_init__(self):
        for name, value in (("radius", self.radius), ("learning_rate", self.learning_rate)):
            check_number(value, f"`{name}`", above=0, schedules=True)
        check_backtracking(self)

    def propose(self, expansion, search):
        rate, radius = scheduled(self.learning_rate, expansion.steps), scheduled(self.radius, expansion.steps)
        model = expansion.quadratic(search.natural)
        whole = model.metric[0, 0] / 2
        fitting = jnp.sqrt(radius / jnp.where(whole > 0, whole, 1.0))
        start = jnp.where(whole * rate**2 > radius, fitting, rate).astype(expansion.loss.dtype)

        def measured(size):
            params = expansion.w + search.along(size)
            divergence, loss = expansion.divergence(params), expansion.loss_at(params)
            # With slack: where the quadratic model is exact, the first guess is on the boundary but for rounding.
            is_good = (divergence <= radius * (1 + 1e-3)) & (loss <= expansion.loss)
            return divergence.astype(size.dtype), loss.astype(size.dtype), is_good

        def shorten(state):
            tries, size, *_ = state
            return tries + 1, self.shrink * size, *measured(self.shrink * size)

        unfinished = lambda state: ~state[-1] & (state[0] < self.max_tries)
        _, size, divergence, loss, is_good = jax.lax.while_loop(
            unfinished, shorten, (jnp.array(1), start, *measured(start))
        )
        c = size[None]
        return Proposal(
            search.along(size),
            size,
            0.0,
            is_accepted=is_good,
            loss_after=loss,
            predicted_decrease=model.decrease(c),
            divergence=divergence,
            predicted_divergence=model.divergence(c),
            cosine=model.cosine(c),
        )

    @property
    def compares_losses(self):
        return True


def check_backtracking(step: Any) -> None:
    name = type(step).__name__
    check_number(step.shrink, "`shrink`", above=0, below=1)
    if not isinstance(step.max_tries, int) or step.max_tries < 1:
        raise ValueError(f"`{name}` needs `max_tries` to be a whole number of at least 1, but got {step.max_tries}.")


class GridLineSearch(AbstractStep):
    """The best of some step sizes, by the loss of the batch after each: one forward pass a size.

    By default halves of one, $1, 2^{-1}, \\dots$; for full batches, where steps of very different lengths may be right,
    as in least squares with neural networks.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0], [2.0]])
    w, batch = jnp.zeros((1, 1)), (x, 3 * x)
    opt = ng.NaturalGradient(
        lambda w, x: x @ w, ng.LeastSquares(), ng.Exact(), ng.NoDamping(), step=ng.GridLineSearch((2.0, 1.0, 0.5))
    )
    w, state, info = jax.jit(opt.step)(w, opt.init(w, batch), batch)
    assert jnp.allclose(info.step_size, 1.0) and jnp.allclose(w, 3.0)
    ```
    """

    sizes: Float[Array, " sizes"]

    @public
    def __init__(self, sizes: Any = tuple(0.5**k for k in range(16))):
        if callable(sizes) or not len(sizes):
            raise ValueError(f"`GridLineSearch` needs `sizes`, at least one number, but got {sizes}.")
        for size in sizes if is_concrete(sizes) else ():
            check_number(size, "each of its `sizes`", above=0)
        self.sizes = jnp.asarray(sizes, float)

    def propose(self, expansion, search):
        sizes = jnp.asarray(self.sizes, expansion.loss.dtype)

        def loss_of(size):
            return expansion.loss_at(expansion.w + search.along(size)).astype(sizes.dtype)

        losses = jax.lax.map(loss_of, sizes)
        # `argmin` would choose NaN.
        losses = jnp.where(jnp.isnan(losses), jnp.inf, losses)
        best = jnp.argmin(losses)
        is_lower = losses[best] <= expansion.loss
        return Proposal(search.along(sizes[best]), sizes[best], 0.0, is_lower, losses[best])

    @property
    def compares_losses(self):
        return True


class ArmijoLineSearch(AbstractStep):
    r"""The first step size, shrinking from `initial`, at which the loss has fallen enough.

    Sizes are `initial` $\cdot$ `shrink`$^k$. Enough is at least the part `sufficient` of what the slope of the loss
    promises, $L(w + sd) \le L(w) + c\,s\,g^\top d$. After `max_tries` the step is rejected.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0], [2.0]])
    w, batch = jnp.zeros((1, 1)), (x, 3 * x)
    opt = ng.NaturalGradient(
        lambda w, x: x @ w, ng.LeastSquares(), ng.Exact(), ng.NoDamping(), step=ng.ArmijoLineSearch(initial=4.0)
    )
    w, state, info = jax.jit(opt.step)(w, opt.init(w, batch), batch)
    assert jnp.allclose(info.step_size, 1.0)  # 4 and 2 did not lower the loss
    ```
    """

    initial: Any = number(1.0)
    shrink: Any = number(0.5)
    sufficient: Any = number(1e-4)
    max_tries: int = eqx.field(default=20, static=True)

    @public
    def __check_init__(self):
        check_number(self.initial, "`initial`", above=0)
        check_number(self.sufficient, "`sufficient`", least=0, below=1)
        check_backtracking(self)

    def propose(self, expansion, search):
        slope = dot(expansion.gradient, search.natural)

        def tried(size):
            loss = expansion.loss_at(expansion.w + search.along(size)).astype(size.dtype)
            return loss, loss <= expansion.loss + self.sufficient * size * slope

        def shorten(state):
            tries, size, *_ = state
            return tries + 1, self.shrink * size, *tried(self.shrink * size)

        start = jnp.asarray(self.initial, expansion.loss.dtype)
        unfinished = lambda state: ~state[-1] & (state[0] < self.max_tries)
        _, size, loss, is_enough = jax.lax.while_loop(unfinished, shorten, (jnp.array(1), start, *tried(start)))
        return Proposal(search.along(size), size, 0.0, is_enough, loss)

    @property
    def compares_losses(self):
        return True
