r"""Per-example gradients in the form $g_i = \sum_t a_{it} h_{it}^\top$, and their statistics from these factors.

Shapes: `n` examples, `c` cotangents an example, `g` groups, `t` positions, `d` inputs, `o` outputs. The inputs `a` are
`ngtd`, the cotangents `h` are `ncgto`, and a gradient `gdo`. With one position nothing is ever formed for an example;
with several, the cheaper of two ways is taken: to form gradients, a few examples at a time, or to work with products of
positions."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad._point.records import MemoryBudget, products, stacked, summed
from natgrad._point.rows import AbstractRows


@dataclass(frozen=True)
class FactoredRows(AbstractRows):
    """The inputs and cotangents of one weight, whose products are the gradients of a batch.

    `expand` takes the data of some examples to their `a` and `h`, so that what is larger than the data (the patches
    under a convolution) exists for a few examples only."""

    data: Any
    expand: Callable[[Any], tuple[Float[Array, "n g t d"], Float[Array, "n c g t o"]]]
    num_examples: int
    num_cotangents: int
    # groups, positions, inputs, outputs
    shape: tuple[int, int, int, int]
    itemsize: int

    @property
    def size(self) -> int:
        groups, _, inputs, outputs = self.shape
        return groups * inputs * outputs

    def expanded_bytes(self) -> int:
        groups, positions, inputs, outputs = self.shape
        return self.itemsize * groups * positions * (inputs + self.num_cotangents * outputs)

    def power_sum(self, power, budget):
        if self.shape[1] == 1:
            a, h = self.expand(self.data)
            # A power of an outer product is the outer product of powers, so no gradient is formed.
            return jnp.einsum("ngd,ngo->gdo", a[:, :, 0] ** power, jnp.sum(h[:, :, :, 0] ** power, axis=1))

        def powers(part):
            return jnp.sum(_formed(*self.expand(part)) ** power, axis=(0, 1))

        return summed(powers, self.data, self._forming_chunk(budget))

    def squared_norms(self, budget):
        _, positions, inputs, outputs = self.shape
        if positions == 1:
            a, h = self.expand(self.data)
            # The norm of an outer product is the product of norms, so no gradient is formed.
            a, h = jnp.sum(a[:, :, 0] ** 2, axis=-1), jnp.sum(h[:, :, :, 0] ** 2, axis=-1)
            return self._by_example(jnp.einsum("ng,ncg->nc", a, h))
        # Multiplications by pairs of positions, against forming the gradients: the cheaper of the two.
        if positions * (inputs / self.num_cotangents + outputs) < inputs * outputs:
            return self._squared_norms_by_pairs(budget)

        def norms(part):
            return self._by_example(jnp.sum(_formed(*self.expand(part)) ** 2, axis=(2, 3, 4)))

        return stacked(norms, self.data, self._forming_chunk(budget))

    def gram(self, budget):
        groups, positions, inputs, outputs = self.shape
        count, columns = self.num_examples, self.num_cotangents
        if groups == positions == 1:
            a, h = self.expand(self.data)
            a, h = a[:, None, 0, 0], h[:, :, 0, 0]
            # Inner products of outer products are products of inner products.
            return self._by_row(products(a, a) * products(h, h))
        if positions == 1:
            return self._pairs(self.data, self.data)
        # Multiplications: between all pairs of positions, or to form the gradients and multiply them.
        by_pairs = count**2 * positions**2 * (inputs + columns**2 * outputs)
        by_forming = count * columns * inputs * outputs * (positions + count * columns)
        if by_pairs < by_forming:
            row_bytes = self.itemsize * groups * count * positions**2 * (1 + columns**2)
            rows = lambda part: self._pairs(part, self.data)
            return stacked(rows, self.data, budget.chunk(count, row_bytes + self.expanded_bytes()))
        return self._gram_by_inputs(budget)

    def _squared_norms_by_pairs(self, budget: MemoryBudget) -> Float[Array, "n c"]:
        """Squared norms through products of positions."""

        def norms(part):
            a, h = self.expand(part)
            inputs, outputs = jnp.einsum("ngtd,ngsd->ngts", a, a), jnp.einsum("ncgto,ncgso->ncgts", h, h)
            return self._by_example(jnp.einsum("ngts,ncgts->nc", inputs, outputs))

        groups, positions, *_ = self.shape
        pairs = self.itemsize * groups * positions**2 * (1 + 2 * self.num_cotangents)
        return stacked(norms, self.data, budget.chunk(self.num_examples, pairs + self.expanded_bytes()))

    def _gram_by_inputs(self, budget: MemoryBudget) -> Float[Array, "n c n c"]:
        """Gradients of all examples are formed for some inputs at a time, and multiplied."""
        a, h = self.expand(self.data)
        rows, groups, *_ = a.shape
        bytes_each = self.itemsize * rows * h.shape[1] * groups * h.shape[-1]

        def product(inputs):
            formed = _formed(jnp.moveaxis(inputs, 0, -1), h).reshape(rows, h.shape[1], -1)
            return products(formed, formed)

        return self._by_row(summed(product, jnp.moveaxis(a, -1, 0), budget.chunk(a.shape[-1], bytes_each)))

    def _pairs(self, left: Any, right: Any) -> Float[Array, "n c m e"]:
        """Inner products between the gradients of two sets of examples, through products of positions."""
        (a, h), (b, k) = self.expand(left), self.expand(right)
        if self.shape[1] == 1:
            inputs = jnp.einsum("ngd,mgd->gnm", a[:, :, 0], b[:, :, 0])
            outputs = jnp.einsum("ncgo,mego->gncme", h[:, :, :, 0], k[:, :, :, 0])
            product = jnp.sum(inputs[:, :, None, :, None] * outputs, axis=0)
        else:
            inputs, outputs = jnp.einsum("ngtd,mgsd->ngtms", a, b), jnp.einsum("ncgto,megso->ncgtmes", h, k)
            product = jnp.einsum("ngtms,ncgtmes->ncme", inputs, outputs)
        return self._by_row(product)

    def _by_row(self, product: Array) -> Float[Array, "n c m e"]:
        """As `_by_example`, on both sides of a Gram matrix."""
        columns = self.num_cotangents
        counts = [product.shape[k] * product.shape[k + 1] // columns for k in (0, 2)]
        return product.reshape(counts[0], columns, counts[1], columns)

    def _by_example(self, rows: Array) -> Array:
        """Cotangents are told apart again where `expand` has turned them into examples."""
        return rows.reshape(-1, self.num_cotangents)

    def _forming_chunk(self, budget: MemoryBudget) -> int:
        formed = self.size * self.num_cotangents
        return budget.chunk(self.num_examples, self.itemsize * formed + self.expanded_bytes(), formed)


def _formed(a: Array, h: Array) -> Float[Array, "n c g d o"]:
    return jnp.einsum("ngtd,ncgto->ncgdo", a, h)
