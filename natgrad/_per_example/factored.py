r"""Statistics of gradients in the form $g_i = \sum_t a_{it} h_{it}^\top$, from their factors.

Shapes: `n` examples, `c` cotangents an example, `g` groups, `t` positions, `d` inputs, `o` outputs. The inputs `a` are
`ngtd`, the cotangents `h` are `ncgto`, and a gradient `gdo`. With one position nothing is ever formed for an example;
with several, the cheaper of two ways is taken: to form gradients, a few examples at a time, or to work with products of
positions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad._per_example.chunks import Budget, products, stacked, summed


class Factors(NamedTuple):
    """The factors of the gradients of a batch with respect to one weight.

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


def power_sum(factors: Factors, power: int, budget: Budget) -> Float[Array, "g d o"]:
    r"""$\sum_i g_i^p$, entry by entry."""
    if factors.shape[1] == 1:
        a, h = factors.expand(factors.data)
        return jnp.einsum("ngd,ngo->gdo", a[:, :, 0] ** power, jnp.sum(h[:, :, :, 0] ** power, axis=1))
    powers = lambda part: jnp.sum(_formed(*factors.expand(part)) ** power, axis=(0, 1))
    return summed(powers, factors.data, _forming_chunk(factors, budget))


def squared_norms(factors: Factors, budget: Budget) -> Float[Array, "n c"]:
    r"""$|g_i|^2$."""
    groups, positions, inputs, outputs = factors.shape
    if positions == 1:
        a, h = factors.expand(factors.data)
        a, h = jnp.sum(a[:, :, 0] ** 2, axis=-1), jnp.sum(h[:, :, :, 0] ** 2, axis=-1)
        return _by_example(jnp.einsum("ng,ncg->nc", a, h), factors)
    if positions * (inputs / factors.num_cotangents + outputs) < inputs * outputs:

        def norms(part):
            a, h = factors.expand(part)
            products = jnp.einsum("ngtd,ngsd->ngts", a, a)
            return _by_example(jnp.einsum("ngts,ncgts->nc", products, jnp.einsum("ncgto,ncgso->ncgts", h, h)), factors)

        pairs = factors.itemsize * groups * positions**2 * (1 + 2 * factors.num_cotangents)
        return stacked(norms, factors.data, budget.chunk(factors.num_examples, pairs + factors.expanded_bytes()))
    norms = lambda part: _by_example(jnp.sum(_formed(*factors.expand(part)) ** 2, axis=(2, 3, 4)), factors)
    return stacked(norms, factors.data, _forming_chunk(factors, budget))


def gram(factors: Factors, budget: Budget) -> Float[Array, "n c n c"]:
    r"""$\langle g_i, g_j\rangle$ for all pairs of examples and cotangents."""
    groups, positions, inputs, outputs = factors.shape
    count, columns = factors.num_examples, factors.num_cotangents
    if groups == positions == 1:
        a, h = factors.expand(factors.data)
        a, h = a[:, None, 0, 0], h[:, :, 0, 0]
        return _by_row(products(a, a) * products(h, h), factors)
    if positions == 1:
        return _pairs(factors, factors.data, factors.data)
    # Multiplications: between all pairs of positions, or to form the gradients and multiply them.
    by_pairs = count**2 * positions**2 * (inputs + columns**2 * outputs)
    by_forming = count * columns * inputs * outputs * (positions + count * columns)
    if by_pairs < by_forming:
        row_bytes = factors.itemsize * groups * count * positions**2 * (1 + columns**2)
        rows = lambda part: _pairs(factors, part, factors.data)
        return stacked(rows, factors.data, budget.chunk(count, row_bytes + factors.expanded_bytes()))
    return _gram_by_blocks(factors, budget)


def _gram_by_blocks(factors: Factors, budget: Budget) -> Float[Array, "n c n c"]:
    """Gradients of all examples are formed for a block of inputs at a time, and multiplied."""
    a, h = factors.expand(factors.data)
    rows, groups, positions, inputs = a.shape
    block_bytes = factors.itemsize * rows * h.shape[1] * groups * h.shape[-1]
    block = budget.chunk(inputs, block_bytes)

    def product(inputs):
        formed = _formed(jnp.moveaxis(inputs, 0, -1), h).reshape(rows, h.shape[1], -1)
        return products(formed, formed)

    return _by_row(summed(product, jnp.moveaxis(a, -1, 0), block), factors)


def _pairs(factors: Factors, left: Any, right: Any) -> Float[Array, "n c m e"]:
    """Inner products of the gradients of some examples with those of others, through products of positions."""
    (a, h), (b, k) = factors.expand(left), factors.expand(right)
    groups, positions, *_ = factors.shape
    if positions == 1:
        inputs = jnp.einsum("ngd,mgd->gnm", a[:, :, 0], b[:, :, 0])
        outputs = jnp.einsum("ncgo,mego->gncme", h[:, :, :, 0], k[:, :, :, 0])
        product = jnp.sum(inputs[:, :, None, :, None] * outputs, axis=0)
    else:
        inputs, outputs = jnp.einsum("ngtd,mgsd->ngtms", a, b), jnp.einsum("ncgto,megso->ncgtmes", h, k)
        product = jnp.einsum("ngtms,ncgtmes->ncme", inputs, outputs)
    return _by_row(product, factors)


def _by_row(product: Array, factors: Factors) -> Float[Array, "n c m e"]:
    """As `_by_example`, on both sides of a Gram matrix."""
    columns = factors.num_cotangents
    counts = [product.shape[k] * product.shape[k + 1] // columns for k in (0, 2)]
    return product.reshape(counts[0], columns, counts[1], columns)


def _formed(a: Array, h: Array) -> Float[Array, "n c g d o"]:
    return jnp.einsum("ngtd,ncgto->ncgdo", a, h)


def _by_example(rows: Array, factors: Factors) -> Array:
    """Cotangents are told apart again where `expand` has turned them into examples."""
    return rows.reshape(-1, factors.num_cotangents)


def _forming_chunk(factors: Factors, budget: Budget) -> int:
    formed = factors.size * factors.num_cotangents
    return budget.chunk(factors.num_examples, factors.itemsize * formed + factors.expanded_bytes(), formed)
