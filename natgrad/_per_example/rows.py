"""Statistics of gradients that are formed for every example, a few examples at a time.

For parameters that act entry by entry (biases, scales, shifts) a gradient is no larger than the activations. For a
parameter that is used in a way no rule knows, this costs time, and memory only as the budget allows."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad._per_example.chunks import Budget, products, stacked, summed


class Rows(NamedTuple):
    """The gradients of a batch with respect to one parameter, formed by `expand` from the data of some examples."""

    data: Any
    expand: Callable[[Any], Float[Array, "n c ..."]]
    num_examples: int
    num_cotangents: int
    # bytes that the gradients of one example need while they are formed
    bytes_each: int

    def chunk(self, budget: Budget) -> int:
        return budget.chunk(self.num_examples, self.bytes_each)


def power_sum(rows: Rows, power: int, budget: Budget) -> Float[Array, "..."]:
    return summed(lambda part: jnp.sum(rows.expand(part) ** power, axis=(0, 1)), rows.data, rows.chunk(budget))


def squared_norms(rows: Rows, budget: Budget) -> Float[Array, "n c"]:
    norms = lambda part: jnp.sum(_flat(rows.expand(part)) ** 2, axis=-1)
    return stacked(norms, rows.data, rows.chunk(budget))


def gram(rows: Rows, budget: Budget) -> Float[Array, "n c n c"]:
    """Each chunk is multiplied with every chunk, formed anew, so that no more than two are held."""
    chunk = rows.chunk(budget)

    def against_all(part):
        left = _flat(rows.expand(part))
        if chunk >= rows.num_examples:
            return products(left, left)
        with_part = lambda other: products(_flat(rows.expand(other)), left)
        return stacked(with_part, rows.data, chunk).transpose(2, 3, 0, 1)

    return stacked(against_all, rows.data, chunk)


def _flat(rows: Array) -> Float[Array, "n c p"]:
    return rows.reshape(*rows.shape[:2], -1)
