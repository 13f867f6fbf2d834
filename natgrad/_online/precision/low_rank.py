from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad import _linalg
from natgrad._online.precision.base import AbstractPrecision, Rows, Vector
from natgrad._types import Matrix


class LowRankState(NamedTuple):
    r"""$\Lambda = \operatorname{diag}(d) + W^\top W$."""

    diagonal: Vector
    rows: Float[Array, "rank P"]


class LowRankPrecision(AbstractPrecision):
    """A diagonal plus a few directions: those of which most is known, while of the others the diagonal is kept."""

    rank: int = 10

    def __check_init__(self):
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"`LowRankPrecision` needs a `rank` of at least 1, but got {self.rank}.")

    def init(self, precision):
        return LowRankState(precision, jnp.zeros((self.rank, precision.size), precision.dtype))

    def faded(self, state, forget, noise):
        diagonal, rows = forget * state.diagonal, jnp.sqrt(forget) * state.rows
        # (Lambda^-1 + q I)^-1 is again diagonal plus low rank, by Woodbury's identity.
        kept = 1 / (1 + noise * diagonal)
        shrunk = rows * kept[None]
        root = _linalg.cholesky(_identity_plus(noise * shrunk @ rows.T))
        return LowRankState(kept * diagonal, _linalg.triangular_solve(root, shrunk))

    def grown(self, state, rows):
        stacked = jnp.concatenate([state.rows, rows])
        # W'W is the same in any orthogonal combination of the rows; here those with the largest norm come first.
        _, values, vectors = _linalg.svd(stacked)
        turned = jnp.zeros_like(stacked).at[: len(values)].set(values[:, None] * vectors)
        kept, dropped = turned[: self.rank], turned[self.rank :]
        return LowRankState(state.diagonal + jnp.sum(dropped**2, axis=0), kept)

    def solve(self, state, covector):
        scaled, root = _woodbury(state)
        own = covector / state.diagonal
        return own - scaled.T @ _linalg.cholesky_solve(root, (state.rows @ own)[:, None])[:, 0]

    def covariance(self, state):
        scaled, root = _woodbury(state)
        return jnp.diag(1 / state.diagonal) - scaled.T @ _linalg.cholesky_solve(root, scaled)


def _woodbury(state: LowRankState) -> tuple[Rows, Matrix]:
    r"""$W D^{-1}$, and the Cholesky factor of $I + W D^{-1} W^\top$."""
    scaled = state.rows / state.diagonal[None]
    return scaled, _linalg.cholesky(_identity_plus(scaled @ state.rows.T))


def _identity_plus(matrix: Matrix) -> Matrix:
    """The identity plus a matrix that is symmetric but for rounding."""
    return jnp.eye(len(matrix), dtype=matrix.dtype) + (matrix + matrix.T) / 2
