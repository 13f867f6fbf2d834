"""The precision of a Gaussian over the parameters, kept dense, diagonal, or as a diagonal plus low rank."""

from abc import abstractmethod
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from natgrad import _linalg
from natgrad._check import caller, public
from natgrad._types import Matrix

Flat = Float[Array, " P"]
Rows = Float[Array, "rows P"]


class AbstractPrecision(eqx.Module):
    r"""How to store the precision $\Lambda$ of a Gaussian over the parameters and update it.

    For every batch, first `faded`, $\Lambda^{-1} \leftarrow \Lambda^{-1} / f + q I$, then `grown` by the rows $A$ of
    the root of the metric, $\Lambda \leftarrow \Lambda + A^\top A$. Steps are $\Lambda^{-1}g$."""

    @abstractmethod
    def init(self, precision: Flat) -> PyTree:
        """The state for a diagonal precision."""

    @abstractmethod
    def faded(self, state: PyTree, forget: Any, noise: Any) -> PyTree:
        r"""The state with covariance $\Lambda^{-1} / f + q I$, where $f$ is `forget` and $q$ is `noise`."""

    @abstractmethod
    def grown(self, state: PyTree, rows: Rows) -> PyTree:
        r"""The state with precision $\Lambda + A^\top A$, where $A$ are the `rows`."""

    @abstractmethod
    def solve(self, state: PyTree, covector: Flat) -> Flat:
        r"""$\Lambda^{-1}g$."""

    @abstractmethod
    def covariance(self, state: PyTree) -> Matrix:
        r"""$\Lambda^{-1}$ as a dense matrix."""


class DensePrecision(AbstractPrecision):
    r"""The whole precision matrix: the extended Kalman filter.

    A step costs $P^2$ for every row, and $P^3$ with process noise.

    The state is a root $L$ of the covariance $L L^\top$ (Potter's form), so rounding cannot make it indefinite.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    opt = ng.OnlineNaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), precision=ng.DensePrecision())
    w = jnp.zeros(2)
    w, state, info = opt.step(w, opt.init(w), (jnp.array([[1.0, 0.0]]), jnp.array([2.0])))
    assert jnp.allclose(w, jnp.array([1.0, 0.0]))  # half way, since the prior weighs as much as the example
    ```
    """

    def init(self, precision):
        return jnp.diag(1 / jnp.sqrt(precision))

    def faded(self, state, forget, noise):
        faded = state / jnp.sqrt(jnp.asarray(forget, state.dtype))
        if _is_zero(noise):
            return faded
        # Only with noise: the product and its factorisation cost P^3, and lose half of the digits of the root.
        return _linalg.cholesky(faded @ faded.T + noise * jnp.eye(len(state), dtype=state.dtype))

    def grown(self, state, rows):
        def add_row(root, row):
            f = root.T @ row
            # Potter's update: subtracting from the covariance itself, rounding could make it indefinite.
            gain = 1 / (1 + f @ f)
            return root - (gain / (1 + jnp.sqrt(gain))) * jnp.outer(root @ f, f), None

        return jax.lax.scan(add_row, state, rows)[0]

    def solve(self, state, covector):
        return state @ (state.T @ covector)

    def covariance(self, state):
        return state @ state.T


def _is_zero(noise: Any) -> bool:
    return isinstance(noise, int | float) and noise == 0


class DiagonalPrecision(AbstractPrecision):
    """The diagonal of the precision only, in as much memory as the parameters.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    opt = ng.OnlineNaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), precision=ng.DiagonalPrecision())
    w = jnp.zeros(2)
    w, state, info = opt.step(w, opt.init(w), (jnp.array([[1.0, 0.0]]), jnp.array([2.0])))
    assert jnp.allclose(w, jnp.array([1.0, 0.0]))  # half way, since the prior weighs as much as the example
    ```
    """

    def init(self, precision):
        return precision

    def faded(self, state, forget, noise):
        return 1 / (1 / (forget * state) + noise)

    def grown(self, state, rows):
        return state + jnp.sum(rows**2, axis=0)

    def solve(self, state, covector):
        return covector / state

    def covariance(self, state):
        return jnp.diag(1 / state)


class LowRankState(NamedTuple):
    r"""$\Lambda = \operatorname{diag}(d) + W^\top W$."""

    diagonal: Flat
    rows: Float[Array, "rank P"]


class LowRankPrecision(AbstractPrecision):
    """A diagonal plus `rank` directions (default 10).

    The directions with the largest precision are kept, and the others add to the diagonal.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    opt = ng.OnlineNaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), precision=ng.LowRankPrecision(rank=1))
    w = jnp.zeros(2)
    w, state, info = opt.step(w, opt.init(w), (jnp.array([[1.0, 0.0]]), jnp.array([2.0])))
    assert jnp.allclose(w, jnp.array([1.0, 0.0]))  # half way, since the prior weighs as much as the example
    ```
    """

    rank: int = 10

    @public
    def __check_init__(self):
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"{caller()} needs a `rank` of at least 1, but got {self.rank}.")

    def init(self, precision):
        return LowRankState(precision, jnp.zeros((self.rank, precision.size), precision.dtype))

    def faded(self, state, forget, noise):
        diagonal, rows = forget * state.diagonal, jnp.sqrt(forget) * state.rows
        # (Lambda^-1 + q I)^-1 is again diagonal plus low rank, by Woodbury's identity.
        shrinkage = 1 / (1 + noise * diagonal)
        shrunk = rows * shrinkage[None]
        root = _linalg.cholesky(_identity_plus(noise * shrunk @ rows.T))
        return LowRankState(shrinkage * diagonal, _linalg.triangular_solve(root, shrunk))

    def grown(self, state, rows):
        stacked = jnp.concatenate([state.rows, rows])
        # W'W does not change if the rows are rotated; the singular value decomposition puts the largest rows first.
        _, values, vectors = _linalg.svd(stacked)
        rotated = jnp.zeros_like(stacked).at[: len(values)].set(values[:, None] * vectors)
        largest, dropped = rotated[: self.rank], rotated[self.rank :]
        return LowRankState(state.diagonal + jnp.sum(dropped**2, axis=0), largest)

    def solve(self, state, covector):
        scaled, root = _woodbury(state)
        by_diagonal = covector / state.diagonal
        return by_diagonal - scaled.T @ _linalg.cholesky_solve(root, (state.rows @ by_diagonal)[:, None])[:, 0]

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
