"""Step sizes found by trying: the best of a grid, or the first that lowers the loss enough."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from natgrad._check import check_number, public
from natgrad._optimiser.step.base import AbstractStep, Proposal, dot
from natgrad._optimiser.step.trust_region import check_backtracking


class GridLineSearch(AbstractStep):
    """The best of some step sizes, by the loss of the batch after each: one forward pass a size.

    By default halves of one, $1, 2^{-1}, \\dots$; for full batches, where steps of very different lengths may be right,
    as in least squares with neural networks."""

    sizes: Sequence[float] = tuple(0.5**k for k in range(16))

    @public
    def __check_init__(self):
        if callable(self.sizes) or not len(self.sizes):
            raise ValueError(f"`GridLineSearch` needs `sizes`, at least one number, but got {self.sizes}.")
        for size in self.sizes:
            check_number(size, "each of its `sizes`", above=0)

    def propose(self, context):
        sizes = jnp.asarray(self.sizes, context.loss.dtype)
        loss_of = lambda size: context.loss_at(context.params + context.update(size, 0.0)).astype(sizes.dtype)
        losses = jax.lax.map(loss_of, sizes)
        losses = jnp.where(jnp.isnan(losses), jnp.inf, losses)
        best = jnp.argmin(losses)
        is_lower = losses[best] <= context.loss
        return Proposal(context.update(sizes[best], 0.0), sizes[best], 0.0, is_lower, losses[best])

    @property
    def compares_losses(self):
        return True


class ArmijoLineSearch(AbstractStep):
    r"""The first of the sizes `initial` $\cdot$ `shrink`$^k$ at which the loss has fallen by at least the part
    `sufficient` of what its slope promises, $L(w + sd) \le L(w) + c\,s\,g^\top d$. After `max_tries` the step is
    rejected."""

    initial: float = 1.0
    shrink: float = 0.5
    sufficient: float = 1e-4
    max_tries: int = 20

    @public
    def __check_init__(self):
        check_number(self.initial, "`initial`", above=0)
        check_number(self.sufficient, "`sufficient`", least=0, below=1)
        check_backtracking(self)

    def propose(self, context):
        slope = dot(context.gradient, context.direction)

        def tried(size):
            loss = context.loss_at(context.params + context.update(size, 0.0)).astype(size.dtype)
            return loss, loss <= context.loss + self.sufficient * size * slope

        def shorten(state):
            tries, size, *_ = state
            return tries + 1, self.shrink * size, *tried(self.shrink * size)

        start = jnp.asarray(self.initial, context.loss.dtype)
        unfinished = lambda state: ~state[-1] & (state[0] < self.max_tries)
        _, size, loss, is_enough = jax.lax.while_loop(unfinished, shorten, (jnp.array(1), start, *tried(start)))
        return Proposal(context.update(size, 0.0), size, 0.0, is_enough, loss)

    @property
    def compares_losses(self):
        return True
