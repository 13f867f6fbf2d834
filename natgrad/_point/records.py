"""What a batch leaves behind at the sites, from which every statistic is computed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from natgrad import _tree
from natgrad._program.plan import Site
from natgrad._program.values import Dependent, Free
from natgrad._uses.base import Use, spread


@dataclass(frozen=True)
class SiteRecords:
    """The parameters, the free values made of them, the recorded values with the examples in front, and the cotangents
    of the sites' results, with the examples and then the cotangents of each example in front. Where examples count
    differently, `weights` says how much each does among inputs; cotangents have the roots of them already."""

    leaves: list[Any]
    free: dict[Free, Any]
    records: dict[Dependent, Any]
    cotangents: dict[int, list[Any]]
    lengths: dict[int, int]
    weights: Any = None

    @property
    def num_examples(self) -> int:
        return next(iter(self.cotangents.values()))[0].shape[0]

    @property
    def num_cotangents(self) -> int:
        return next(iter(self.cotangents.values()))[0].shape[1]

    def of(self, site: Site) -> tuple[list[Any], list[Any]]:
        return [self.records[value] for value in site.recorded], self.cotangents[site.number]

    def operand(self, use: Use, position: int) -> Any:
        """An operand beside the weight, for every example and every step of the site's loops."""
        value, loops = use.site.operands[position], use.site.loops
        if isinstance(value, Dependent):
            return jax.vmap(lambda x: spread(x, value.loops, loops, self.lengths))(self.records[value])
        known = spread(jnp.asarray(self.free[value]), value.loops, loops, self.lengths)
        return jnp.broadcast_to(known, (self.num_examples, *known.shape))


# Numbers that fit the cache of a core, and numbers that do not fit the cache of a CPU by far.
CACHED = 2**16
UNCACHED = 2**21


class MemoryBudget(NamedTuple):
    """How many bytes may be in flight at once, beyond what a gradient needs."""

    bytes: int = 2**26

    def chunk(self, count: int, bytes_each: int, formed: int = 0) -> int:
        """How many examples to take at once, of `count`, if each needs `bytes_each`.

        `formed` is how many numbers a product forms for each example. XLA writes all such products to memory before
        it reduces them, so on CPUs large ones are taken a few at a time, to stay in the cache: squares of 512
        gradients of 10,000 numbers take 15 ms instead of 32 ms, squares of 256 gradients of 4,608 numbers 6 ms either
        way (JAX 0.10.1). Reproduced by `test_products_are_written_to_memory_before_they_are_reduced`."""
        chunk = self.bytes // max(bytes_each, 1)
        if formed and jax.default_backend() == "cpu" and formed * count > UNCACHED:
            chunk = min(chunk, CACHED // formed)
        return max(1, min(count, chunk))


def summed(function: Callable[[PyTree], PyTree], data: PyTree, chunk: int) -> PyTree:
    """The sum of `function(part)` over parts of at most `chunk` examples, which stand along the leading axes.

    Parts are of one size but for the last, so that no part holds anything but examples."""
    count = _count(data)
    if chunk >= count:
        return function(data)
    chunk = _even(count, chunk)
    whole = count - count % chunk
    parts = jax.tree.map(lambda x: x[:whole].reshape(whole // chunk, chunk, *x.shape[1:]), data)
    zeros = _tree.zeros(jax.eval_shape(function, _tree.take(parts, 0)))

    def step(total, part):
        return jax.tree.map(jnp.add, total, function(part)), None

    total, _ = jax.lax.scan(step, zeros, parts)
    if whole == count:
        return total
    return jax.tree.map(jnp.add, total, function(_tree.take(data, slice(whole, None))))


def stacked(function: Callable[[PyTree], Any], data: PyTree, chunk: int) -> Any:
    """`function(part)` for parts of at most `chunk` examples, which must give one row an example, put together.

    The last part is filled up with repetitions of the last example, whose rows are dropped."""
    count = _count(data)
    if chunk >= count:
        return function(data)
    chunk = _even(count, chunk)
    num_parts = -(-count // chunk)

    def fill(x):
        return jnp.pad(x, [(0, num_parts * chunk - count)] + [(0, 0)] * (x.ndim - 1), mode="edge")

    rows = jax.lax.map(function, jax.tree.map(lambda x: fill(x).reshape(num_parts, chunk, *x.shape[1:]), data))
    return rows.reshape(-1, *rows.shape[2:])[:count]


def products(left: Float[Array, "n c p"], right: Float[Array, "m e p"]) -> Float[Array, "n c m e"]:
    """All inner products.

    As a product of two matrices, because the same `einsum` compiles to half as many instructions again: a Gram matrix
    of a network with three layers takes 0.63 s to compile instead of 0.95 s (JAX 0.10.1, CPU). Reproduced by
    `test_products_of_matrices_compile_to_fewer_instructions`."""
    rows, columns = left.reshape(-1, left.shape[-1]), right.reshape(-1, right.shape[-1])
    return (rows @ columns.T).reshape(*left.shape[:2], *right.shape[:2])


def _count(data: PyTree) -> int:
    return jax.tree.leaves(data)[0].shape[0]


def _even(count: int, chunk: int) -> int:
    """A size of parts no larger than `chunk`: one that divides the examples, if it is not much smaller."""
    divisor = next(size for size in range(chunk, 0, -1) if count % size == 0)
    return divisor if 2 * divisor > chunk else -(-count // -(-count // chunk))
