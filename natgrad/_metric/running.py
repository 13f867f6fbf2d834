"""Averages that forget: an estimate from many batches, of which the last count most."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from natgrad import _tree
from natgrad._block.eigen import EigenBlock
from natgrad._check import is_concrete, real_array


class RunningState(NamedTuple):
    """The sum of all estimates so far, weighed down by age, and the sum of the weights."""

    total: PyTree
    weight: Float[Array, ""]


class RunningAverage(eqx.Module):
    r"""The exponential moving average of any tree of arrays: a diagonal, a gradient, the factors of a metric.

    $\bar d_k = \frac{\sum_j \beta^{k-j} d_j}{\sum_j \beta^{k-j}}$ for estimates $d_j$, where $\beta$ is `decay`.

    Dividing by the weights removes the bias towards the zero it starts from. With `decay` 1 it is the plain
    average.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    average = ng.RunningAverage(decay=0.5)
    state = average.init(jnp.zeros(()))
    for value in (1.0, 4.0):
        state = average.update(state, jnp.array(value))
    assert jnp.allclose(average.value(state), (0.5 * 1 + 4) / 1.5)
    ```
    """

    decay: Any = 0.95

    def __check_init__(self):
        decay = real_array(self.decay, "`RunningAverage`: `decay`")
        if is_concrete(decay) and not 0 < float(decay) <= 1:
            raise ValueError(f"`RunningAverage` needs a `decay` above 0 and at most 1, but got {self.decay}.")

    def init(self, like: PyTree) -> RunningState:
        """An average of nothing yet, of trees like this one (or its shapes), in single precision at least."""
        refuse_bases(like)
        total = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, _tree.wide(leaf)), _arrays(like))
        return RunningState(total, jnp.zeros(()))

    def update(self, state: RunningState, estimate: PyTree, *, is_good: Any = True) -> RunningState:
        """The average with one more estimate; with one that is not good, as it was."""
        structures = [jax.tree.structure(tree) for tree in (state.total, estimate)]
        if structures[0] != structures[1]:
            raise ValueError(
                f"`RunningAverage.update` needs a tree like the one given to `init`, {structures[0]}, but got "
                f"{structures[1]}. Start another average with `init` for it."
            )
        refuse_bases(estimate)
        decayed = lambda total, new: jnp.asarray(self.decay, total.dtype) * total + new.astype(total.dtype)
        kept = lambda total, new: (
            decayed(total, new) if is_good is True else jnp.where(is_good, decayed(total, new), total)
        )
        return RunningState(
            jax.tree.map(kept, state.total, _arrays(estimate)), kept(state.weight, jnp.ones((), state.weight.dtype))
        )

    def value(self, state: RunningState) -> PyTree:
        """The average so far. Before the first update there is none, and concrete states are refused."""
        if is_concrete(state.weight) and float(state.weight) == 0:
            raise ValueError("`RunningAverage.value` needs at least one `update`: an average of nothing has no value.")
        return self._value(state)

    def _value(self, state: RunningState) -> PyTree:
        """The average so far; before the first update, zeros."""
        return _tree.scale(jnp.where(state.weight > 0, 1 / jnp.maximum(state.weight, 1e-30), 0.0), state.total)


def _arrays(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jnp.asarray(leaf), tree)


def refuse_bases(tree: PyTree) -> None:
    """Bases of eigenvectors cannot be averaged."""
    is_eigen = lambda node: isinstance(node, EigenBlock)
    if any(map(is_eigen, jax.tree.leaves(tree, is_leaf=is_eigen))):
        raise TypeError(
            "`RunningAverage` cannot average metrics in eigenvectors of their own, which change from batch to batch. "
            "Average those of `kfac`, and give the result to `ekfac(..., basis=...)`."
        )
