r"""Maximum likelihood from a stream, one example at a time: $\xi \leftarrow \xi + a_k(t(x_k) - \xi)$ on the moments."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from natgrad import _tree
from natgrad._check import are_met, caller, public
from natgrad._family.base import AbstractFamily, all_finite
from natgrad._text import track
from natgrad._types import Moments, Natural, Observation


class OnlineState(NamedTuple):
    """The estimate after some examples.

    `examples` counts them, up to the largest integer. `lost` is the rounding error of the sums in `moments`, added to
    the next change (Kahan's summation): in single precision the millionth example counts as much as the first.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    online = ng.OnlineMaximumLikelihood(ng.Poisson())
    state = online.update_many(online.init(jnp.array(0.0)), jnp.array([1.0, 3.0]))
    assert state.examples == 2 and jnp.allclose(state.moments, 2.0)
    ```
    """

    examples: Int[Array, ""]
    moments: Moments
    lost: Moments


class OnlineMaximumLikelihood(eqx.Module):
    r"""Maximum likelihood of an exponential family from a stream of observations, in the memory of one estimate.

    Example $k$ moves the moments by $\xi \leftarrow \xi + a_k(t(x_k) - \xi)$, which is a natural-gradient step on its
    log-likelihood. With $a_k = 1/k$, the default, the moments after every example are the moments of the
    maximum-likelihood estimate of all examples so far, to rounding.

    The state holds moments, because the first estimates may lie on the boundary of the family, where natural parameters
    do not exist (one observation has no variance). `is_inside` says whether `natural` can convert the moments.

    **Arguments:**

    - `family`: an exponential family.
    - `rate`: $a_k$ for $k = 2, 3, \dots$, a number above 0 and at most 1 (exponential forgetting) or a function of $k$
      such as a schedule of optax; by default $1/k$. Always $a_1 = 1$.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    online = ng.OnlineMaximumLikelihood(ng.Poisson())
    state = online.update(online.init(jnp.array(1.0)), jnp.array(3.0))
    state = online.update_many(state, jnp.array([2.0, 4.0]))
    online.natural(state)  # the logarithm of the mean, 3
    ```
    """

    family: Any
    rate: Any = None

    @public
    def __check_init__(self):
        if not isinstance(self.family, AbstractFamily):
            raise TypeError(
                f"{caller()} needs an exponential family such as `Gaussian(1)`, but got `{type(self.family).__name__}`."
            )
        if self.rate is not None and not callable(self.rate) and not 0 < self.rate <= 1:
            raise ValueError(
                f"{caller()} needs a `rate` above 0 and at most 1, but got {self.rate}. Leave it out for the estimate "
                "of all examples."
            )

    @public
    def init(self, x: Observation) -> OnlineState:
        """The state before the first example, for observations with the shapes of `x`."""
        shapes = jax.eval_shape(self._checked_statistics, x)
        zeros = _tree.zeros(shapes)
        return OnlineState(jnp.array(0), zeros, zeros)

    @public
    def update(self, state: OnlineState, x: Observation) -> OnlineState:
        """The state with one more observation."""
        statistics = self._checked_statistics(x)
        self._check_shapes(state, statistics, "one observation; several go to `update_many`")
        return self._advance(state, statistics, 1)

    @public
    def update_many(self, state: OnlineState, xs: Observation) -> OnlineState:
        """The state with the observations along the leading axis of `xs`, as if they had come one by one.

        With the rate $1/k$ they are averaged at once, else in a loop."""
        xs = self.family._check_observation(xs, name="observation array `xs`")
        counts = {leaf.shape[:1] for leaf in jax.tree.leaves(xs)}
        wanted = "observations along the leading axis; a single one goes to `update`"
        if len(counts) != 1 or counts == {()}:
            raise ValueError(f"{caller()} needs {wanted}.")
        ((count,),) = counts
        single = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), xs)
        self._check_shapes(state, jax.eval_shape(self._checked_statistics, single), wanted)
        statistics = jax.vmap(self.family._statistics)(xs)
        if count == 0:
            return state
        if self.rate is None:
            return self._advance(state, jax.tree.map(lambda t: jnp.mean(t, axis=0), statistics), count)
        return jax.lax.scan(lambda state, t: (self._advance(state, t, 1), None), state, statistics)[0]

    @public
    def update_all(self, state: OnlineState, batches: Iterable[Observation], *, progress: bool = False) -> OnlineState:
        """The state after an iterable of batches, such as a data loader; `progress=True` shows a progress bar."""
        update = eqx.filter_jit(type(self).update_many)
        for xs in track(batches, "Examples", show=progress):
            state = update(self, state, xs)
        return state

    @public
    def merge(self, first: OnlineState, second: OnlineState) -> OnlineState:
        """The state of two streams together, for example of two shards of the data."""
        if self.rate is not None:
            raise ValueError(
                f"{caller()} needs the rate 1/k, but `rate` is {self.rate}: with other rates the result depends on the "
                "order of the examples, and two streams have no common order. Leave out `rate`."
            )
        return self._advance(first, _tree.add(second.moments, second.lost), second.examples)

    def is_inside(self, state: OnlineState) -> Bool[Array, ""]:
        """Whether the moments belong to a member of the family, so that `natural` can convert them."""
        return (state.examples > 0) & are_met([all_finite(state.moments), *self.family._moment_domain(state.moments)])

    @public
    def natural(self, state: OnlineState) -> Natural:
        """The natural parameters of the estimate; raises if its moments are on the boundary of the family."""
        return self.family._to_natural(self.family._check_moments(state.moments, "the average statistic of the stream"))

    def _checked_statistics(self, x: Observation) -> Moments:
        return self.family._statistics(self.family._check_observation(x))

    def _check_shapes(self, state: OnlineState, statistics: Moments, wanted: str) -> None:
        shapes = [jax.tree.map(lambda leaf: leaf.shape, tree) for tree in (state.moments, statistics)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{caller()} needs {wanted}. The state has moments of shapes {shapes[0]}, but the statistics of an "
                f"observation have {shapes[1]}."
            )

    def _advance(self, state: OnlineState, statistics: Moments, count: Any) -> OnlineState:
        """Move the moments towards the mean statistics of `count` examples."""
        largest = jnp.iinfo(state.examples.dtype).max
        count = jnp.asarray(count, state.examples.dtype)
        total = jnp.where(state.examples > largest - count, largest, state.examples + count)

        def rate_as(dtype: Any) -> Array:
            if self.rate is None:
                return count.astype(dtype) / jnp.maximum(total, 1).astype(dtype)
            rate = jnp.asarray(self.rate(total) if callable(self.rate) else self.rate, dtype)
            # The zeros before the first example are no estimate, so the first example replaces them.
            return jnp.where(state.examples == 0, 1.0, rate)

        def advance_leaf(moment: Array, new: Array, lost: Array) -> tuple[Array, Array]:
            change = rate_as(moment.dtype) * (new.astype(moment.dtype) - moment - lost) + lost
            after = moment + change
            return after, change - (after - moment)

        leaves, treedef = jax.tree.flatten(state.moments)
        news, losts = treedef.flatten_up_to(statistics), treedef.flatten_up_to(state.lost)
        pairs = map(advance_leaf, leaves, news, losts)
        moments, lost = (jax.tree.unflatten(treedef, list(column)) for column in zip(*pairs, strict=True))
        return OnlineState(total, moments, lost)
