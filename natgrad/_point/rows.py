"""Per-example gradients with respect to one parameter, and their statistics.

`AbstractRows` says what is asked of them. `DenseRows` forms gradients, a few examples at a time. For parameters that
act entry by entry (biases, scales, shifts) a gradient is no larger than the activations. For a parameter that is used
in a way no rule knows, this costs time, and memory only as the budget allows."""

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad._point.records import MemoryBudget, products, stacked, summed


class AbstractRows(abc.ABC):
    r"""The gradients $g_i$ of a batch with respect to one parameter: a row for every example and cotangent."""

    @abc.abstractmethod
    def power_sum(self, power: int, budget: MemoryBudget) -> Float[Array, "..."]:
        r"""$\sum_i g_i^p$ for an even power, entry by entry."""

    @abc.abstractmethod
    def squared_norms(self, budget: MemoryBudget) -> Float[Array, "n c"]:
        r"""$|g_i|^2$."""

    @abc.abstractmethod
    def gram(self, budget: MemoryBudget) -> Float[Array, "n c n c"]:
        r"""$\langle g_i, g_j\rangle$ for all pairs of rows."""


@dataclass(frozen=True)
class DenseRows(AbstractRows):
    """Gradients that `expand` forms from the data of some examples."""

    data: Any
    expand: Callable[[Any], Float[Array, "n c ..."]]
    num_examples: int
    num_cotangents: int
    # bytes that the gradients of one example need while they are formed
    bytes_each: int

    def power_sum(self, power, budget):
        return summed(lambda part: jnp.sum(self.expand(part) ** power, axis=(0, 1)), self.data, self.chunk(budget))

    def squared_norms(self, budget):
        def norms(part):
            return jnp.sum(_flat(self.expand(part)) ** 2, axis=-1)

        return stacked(norms, self.data, self.chunk(budget))

    def gram(self, budget):
        # Each chunk is multiplied with every chunk, formed anew, so that no more than two are held.
        chunk = self.chunk(budget)

        def against_all(part):
            left = _flat(self.expand(part))
            if chunk >= self.num_examples:
                return products(left, left)
            with_part = lambda other: products(_flat(self.expand(other)), left)
            return stacked(with_part, self.data, chunk).transpose(2, 3, 0, 1)

        return stacked(against_all, self.data, chunk)

    def chunk(self, budget: MemoryBudget) -> int:
        return budget.chunk(self.num_examples, self.bytes_each)


def _flat(rows: Array) -> Float[Array, "n c p"]:
    return rows.reshape(*rows.shape[:2], -1)
