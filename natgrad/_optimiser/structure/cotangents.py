"""The cotangents of outputs from which statistics of the metric are computed."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from natgrad import _tree
from natgrad._optimiser.cost import TermPoint
from natgrad._types import Key, Output


def columns_of(term_point: TermPoint, key: Key | None, num_samples: int, number: int) -> Output:
    """Columns whose products with themselves sum to the metric of every output, times the weight of the term: exact,
    or drawn with a key."""
    keys = None if key is None else keys_of_examples(key, num_samples, term_point.point.num_examples, number)
    columns = term_point.point.exact_columns() if keys is None else term_point.point.sampled_columns(keys)
    return _tree.scale(jnp.sqrt(jnp.asarray(term_point.weight, float)), columns)


def keys_of_examples(key: Key, num_samples: int, count: int, number: int) -> Key:
    """A key for every draw and every example of a batch. As by `jax.random.split`, but without drawing anything for it,
    which would take a quarter of a second to compile."""
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    data, kind = (jax.random.key_data(key), jax.random.key_impl(key)) if is_typed else (key, "threefry2x32")
    if data.shape != (2,):
        keys = jax.random.split(jax.random.fold_in(key, number), num_samples * count)
        return keys.reshape(num_samples, count, *keys.shape[1:])
    numbers = jax.lax.iota(jnp.uint32, num_samples * count).reshape(num_samples, count)
    first = _mixed(data[0] ^ _mixed(data[1] + jnp.uint32(0x9E3779B9 + number)))
    words = jnp.broadcast_to(first, numbers.shape), _mixed(data[1] ^ first) ^ numbers
    return jax.random.wrap_key_data(jnp.stack(words, axis=-1), impl=kind)


def _mixed(word: Array) -> Array:
    """A word whose bits all depend on all bits of another (the finaliser of MurmurHash3)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = (word ^ (word >> jnp.uint32(shift))) * jnp.uint32(factor)
    return word ^ (word >> jnp.uint32(16))
