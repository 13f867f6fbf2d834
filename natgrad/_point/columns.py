r"""Columns $s_{ic}$ of the metrics of outputs, $G_z(z_i) = \sum_c s_{ic} s_{ic}^\top$: exact, or sampled so that the
sum is right on average. Columns stand in front of examples, `(C, N, ...)`."""

import jax

from natgrad import _tree
from natgrad._check import caller
from natgrad._geometry.base import AbstractGeometry
from natgrad._types import Key, Output


def check_num_samples(num_samples: int) -> None:
    if not isinstance(num_samples, int) or num_samples < 1:
        raise ValueError(f"{caller()} needs `num_samples` to be a whole number of at least 1, but got {num_samples}.")


def output_columns(geometry: AbstractGeometry, z: Output, key: Key | None, num_samples: int) -> Output:
    """The columns of every output: exact without a key, else `num_samples` draws over the root of their number."""
    if key is None:
        return factor_columns(geometry, z)
    return _tree.scale(num_samples**-0.5, sample_columns(geometry, z, key, num_samples))


def factor_columns(geometry: AbstractGeometry, z: Output) -> Output:
    """The columns of the factor of every output's metric, with an axis of columns in front of that of examples."""
    name = type(geometry).__name__
    try:
        columns = jax.vmap(geometry.factor, out_axes=1)(z)
    except NotImplementedError as error:
        raise TypeError(
            f"`{name}` has no factor, so backward passes cannot be exact. Give it a `_factor`, or pass a `key`, with "
            "which cotangents are sampled instead."
        ) from error
    found, wanted = ([leaf.shape for leaf in jax.tree.leaves(tree)] for tree in (columns, z))
    if [shape[1:] for shape in found] != wanted or len({shape[:1] for shape in found}) != 1:
        given = [(*shape[:1], *shape[2:]) for shape in found]
        raise ValueError(
            f"`{name}.factor` needs to return columns like the output of an example, with their axis in front, but for "
            f"an output of shapes {[shape[1:] for shape in wanted]} it returned shapes {given}."
        )
    return columns


def sample_columns(geometry: AbstractGeometry, z: Output, key: Key, num_samples: int) -> Output:
    """Draws of output cotangents, with an axis of draws in front of that of examples."""
    count = jax.tree.leaves(z)[0].shape[0]
    return draw(geometry, z, jax.vmap(lambda key: jax.random.split(key, count))(jax.random.split(key, num_samples)))


def draw(geometry: AbstractGeometry, z: Output, keys: Key) -> Output:
    """One draw of output cotangents for every key, draws in front and then examples."""
    return jax.vmap(jax.vmap(geometry.sample), in_axes=(None, 0))(z, keys)
