"""Maximum likelihood from a stream: mirror descent on moments, one example at a time."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from natgrad import _tree
from natgrad._check import are_met
from natgrad._family.base import AbstractFamily, all_finite
from natgrad._text import track
from natgrad._types import Moments, Natural, Observation


class OnlineState(NamedTuple):
    """How many examples were seen, up to the largest integer; the moments; and what rounding has taken from them."""

    examples: Int[Array, ""]
    moments: Moments
    lost: Moments


class OnlineMaximumLikelihood(eqx.Module):
    r"""Maximum likelihood of an exponential family from a stream of observations, in the memory of one estimate.

    Example $k$ moves the moments by $\xi \leftarrow \xi + a_k(t(x_k) - \xi)$, which is a natural-gradient step on its
    log-likelihood. With $a_k = 1/k$, the default, they are after every example those of the maximum-likelihood estimate
    of all examples so far, to rounding: what a sum loses is kept and added to the next.

    The first estimates may lie on the boundary of the family (one observation has no variance), so it is the moments
    that are kept. `natural` converts them once they are inside; `is_inside` says whether they are.

    **Arguments:**

    - `family`: an exponential family.
    - `rate`: $a_k$ for $k = 2, 3, \dots$, a number between 0 and 1 (a memory that fades) or a function of $k$ such as a
      schedule of optax; by default $1/k$. The first example is always taken whole, since there is nothing before it.
    """

    family: Any
    rate: Any = None

    def __check_init__(self):
        if not isinstance(self.family, AbstractFamily):
            raise TypeError(
                f"`OnlineMaximumLikelihood` needs an exponential family, but got `{type(self.family).__name__}`."
            )
        if self.rate is not None and not callable(self.rate) and not 0 < self.rate <= 1:
            raise ValueError(
                f"`OnlineMaximumLikelihood` needs a `rate` above 0 and at most 1, but got {self.rate}. Leave it out "
                "for the estimate of all examples."
            )

    def init(self, x: Observation) -> OnlineState:
        """The state before the first example, for observations like `x`, of which only shapes are used."""
        observed = lambda x: self.family._check_observation(x, "init")
        shapes = jax.eval_shape(lambda x: self.family._statistics(observed(x)), x)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return OnlineState(jnp.array(0), zeros, zeros)

    def update(self, state: OnlineState, x: Observation) -> OnlineState:
        """The state with one more observation."""
        statistics = self.family._statistics(self.family._check_observation(x, "update"))
        self._check_shapes(state, statistics, "update", "one observation; several go to `update_many`")
        return self._moved(state, statistics, 1)

    def update_many(self, state: OnlineState, xs: Observation) -> OnlineState:
        """The state with the observations along the leading axis of `xs`, as if they had come one by one: at once where
        the rate is $1/k$."""
        xs = self.family._check_observation(xs, "update_many", name="observation array `xs`")
        counts = {leaf.shape[:1] for leaf in jax.tree.leaves(xs)}
        many = "observations along the leading axis; one goes to `update`"
        if len(counts) != 1 or counts == {()}:
            raise ValueError(f"`OnlineMaximumLikelihood.update_many` needs {many}.")
        ((count,),) = counts
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), xs)
        observed = lambda x: self.family._statistics(self.family._check_observation(x, "update_many"))
        self._check_shapes(state, jax.eval_shape(observed, one), "update_many", many)
        statistics = jax.vmap(self.family._statistics)(xs)
        if count == 0:
            return state
        if self.rate is None:
            return self._moved(state, jax.tree.map(lambda t: jnp.mean(t, axis=0), statistics), count)
        one = lambda state, own: (self._moved(state, own, 1), None)
        return jax.lax.scan(one, state, statistics)[0]

    def update_all(self, state: OnlineState, batches: Iterable[Observation], *, progress: bool = False) -> OnlineState:
        """The state after an iterable of batches, such as a loader of data that is larger than memory."""
        update = eqx.filter_jit(type(self).update_many)
        for xs in track(batches, "Examples", show=progress):
            state = update(self, state, xs)
        return state

    def merge(self, first: OnlineState, second: OnlineState) -> OnlineState:
        """The state of two streams, such as the shards of one, together."""
        if self.rate is not None:
            raise ValueError(
                "`OnlineMaximumLikelihood.merge` needs the rate 1/k: with another, the order of examples matters, and "
                "two streams have none between them."
            )
        return self._moved(first, _tree.add(second.moments, second.lost), second.examples)

    def is_inside(self, state: OnlineState) -> Bool[Array, ""]:
        """Whether the moments are those of a member of the family."""
        return (state.examples > 0) & are_met([all_finite(state.moments), *self.family._moment_domain(state.moments)])

    def natural(self, state: OnlineState) -> Natural:
        """The natural parameters of the estimate, which has to be inside the family."""
        name = "the average statistic of the stream"
        return self.family._to_natural(self.family._check_moments(state.moments, "natural", name))

    def _check_shapes(self, state: OnlineState, statistics: Moments, method: str, needs: str) -> None:
        shapes = [jax.tree.map(lambda leaf: leaf.shape, tree) for tree in (state.moments, statistics)]
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"`OnlineMaximumLikelihood.{method}` needs {needs}. The state has moments of shapes {shapes[0]}, but "
                f"the statistics of an observation have {shapes[1]}."
            )

    def _moved(self, state: OnlineState, statistics: Moments, count: Any) -> OnlineState:
        """Towards the mean statistics of so many examples."""
        largest = jnp.iinfo(state.examples.dtype).max
        count = jnp.asarray(count, state.examples.dtype)
        total = jnp.where(state.examples > largest - count, largest, state.examples + count)

        def one(moment: Array, new: Array, lost: Array) -> tuple[Array, Array]:
            if self.rate is None:
                rate = count.astype(moment.dtype) / jnp.maximum(total, 1).astype(moment.dtype)
            else:
                given = jnp.asarray(self.rate(total) if callable(self.rate) else self.rate, moment.dtype)
                # What there is before the first example is no estimate.
                rate = jnp.where(state.examples == 0, 1.0, given)
            change = rate * (new.astype(moment.dtype) - moment - lost) + lost
            after = moment + change
            return after, change - (after - moment)

        leaves, treedef = jax.tree.flatten(state.moments)
        news, losts = treedef.flatten_up_to(statistics), treedef.flatten_up_to(state.lost)
        pairs = [one(*own) for own in zip(leaves, news, losts, strict=True)]
        moments, lost = (jax.tree.unflatten(treedef, list(own)) for own in zip(*pairs, strict=True))
        return OnlineState(total, moments, lost)
