r"""One factor of a Kronecker product: symmetric matrices, block-diagonal where a whole one would be too large.

A factor is an array `gbkl`: for every group `g`, `b` blocks of size `k` along the diagonal. A dense factor has one
block; a diagonal factor has blocks of size one. The same array holds eigenvectors, in the columns of each block."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad import _tree
from natgrad._block.base import Eigen

Factor = Float[Array, "g _ _ _"]
# Symmetric products with at least so many multiplications are put together from halves, because XLA has no symmetric
# product: 2,048 rows of 2,048 numbers take 67 ms instead of 83 ms, for 0.2 s more to compile; below this size there was
# nothing to gain (JAX 0.10.1, CPU). Reproduced by `test_symmetric_products_are_put_together_from_halves`.
LARGE = 2**30


def second_moment(x: Float[Array, "g m d"], block: int) -> Factor:
    r"""$\sum_m x_m x_m^\top$ in blocks of size `block`."""
    groups, count, size = x.shape
    if block == 1:
        return jnp.sum(x**2, axis=1)[:, :, None, None]
    return _gram(x.reshape(groups, count, size // block, block).swapaxes(1, 2))


def _gram(x: Float[Array, "g b m k"]) -> Factor:
    """The inner products of all columns. In large ones, the lower left quarter is the transpose of the upper right."""
    count, size = x.shape[-2:]
    if count * size**2 < LARGE:
        return jnp.einsum("gbmk,gbml->gbkl", x, x)
    half = size // 2
    left, right = x[..., :half], x[..., half:]
    across = jnp.einsum("gbmk,gbml->gbkl", left, right)
    upper = jnp.concatenate([jnp.einsum("gbmk,gbml->gbkl", left, left), across], axis=-1)
    lower = jnp.concatenate([across.mT, jnp.einsum("gbmk,gbml->gbkl", right, right)], axis=-1)
    return jnp.concatenate([upper, lower], axis=-2)


def apply(factor: Factor, x: Float[Array, "g d o"]) -> Float[Array, "g d o"]:
    """The factor times the rows of `x`."""
    groups, num_blocks, size, _ = factor.shape
    if size == 1:
        return factor[:, :, 0] * x
    split = x.reshape(groups, num_blocks, size, -1)
    return jnp.einsum("gbkl,gblo->gbko", factor, split).reshape(x.shape)


def sandwich(left: Factor, v: Float[Array, "g d o"], right: Factor) -> Float[Array, "g d o"]:
    """`left @ v @ right.T`."""
    if right.shape[1] == 1:
        return jnp.einsum("gdo,gpo->gdp", apply(left, v), right[:, 0])
    return apply(right, apply(left, v).mT).mT


def rotated(factor: Factor, x: Float[Array, "*n g t d"]) -> Float[Array, "*n g t d"]:
    """The coordinates of vectors `x` in the columns of the factor."""
    _, num_blocks, size, _ = factor.shape
    if size == 1:
        return x * jnp.broadcast_to(factor[:, None, :, 0, 0], x.shape)
    split = x.reshape(*x.shape[:-1], num_blocks, size)
    return jnp.einsum("gbkl,...gtbk->...gtbl", factor, split).reshape(x.shape)


def as_matrix(factor: Factor) -> Float[Array, "g d d"]:
    return jax.vmap(lambda blocks: jax.scipy.linalg.block_diag(*blocks))(factor)


def diagonal(factor: Factor) -> Float[Array, "g d"]:
    return diagonals(factor).reshape(factor.shape[0], -1)


def traces(stacks: Sequence[Array]) -> Float[Array, " m"]:
    """The traces of all matrices, in one vector."""
    if not stacks:
        return jnp.zeros(0)
    (sums,) = _tree.promote([jnp.sum(diagonals(stack), axis=-1).reshape(-1) for stack in stacks])
    return jnp.concatenate(sums)


def diagonals(stack: Float[Array, "*stack k k"]) -> Float[Array, "*stack k"]:
    """The diagonals of matrices.

    A strided slice, because `jnp.diagonal` compares two tables of indices: 16 stacks take 0.19 s to compile, and
    0.42 s by `jnp.diagonal` (JAX 0.10.1, CPU). Reproduced by `test_diagonals_are_strided_slices`."""
    *lead, size, _ = stack.shape
    return stack.reshape(*lead, size * size)[..., :: size + 1]


def trace(factor: Factor) -> Float[Array, " g"]:
    return jnp.sum(diagonal(factor), axis=-1)


def values(eigen: Eigen) -> Float[Array, "g d"]:
    """The eigenvalues of a factor, in the order of its blocks."""
    return eigen.values.reshape(eigen.values.shape[0], -1)
