from typing import Any

import jax
import jax.numpy as jnp

from natgrad import _linalg
from natgrad._online.precision.base import AbstractPrecision


class DensePrecision(AbstractPrecision):
    r"""All of it: the extended Kalman filter. A step costs $P^2$ for every row, and $P^3$ with process noise.

    A root $L$ of the covariance $L L^\top$ is kept, which is positive semidefinite whatever rounding does to it, in the
    form of Potter."""

    def init(self, precision):
        return jnp.diag(1 / jnp.sqrt(precision))

    def faded(self, state, forget, noise):
        faded = state / jnp.sqrt(jnp.asarray(forget, state.dtype))
        if _is_zero(noise):
            return faded
        return _linalg.cholesky(faded @ faded.T + noise * jnp.eye(len(state), dtype=state.dtype))

    def grown(self, state, rows):
        def one(root, row):
            f = root.T @ row
            gain = 1 / (1 + f @ f)
            return root - (gain / (1 + jnp.sqrt(gain))) * jnp.outer(root @ f, f), None

        return jax.lax.scan(one, state, rows)[0]

    def solve(self, state, covector):
        return state @ (state.T @ covector)

    def covariance(self, state):
        return state @ state.T


def _is_zero(noise: Any) -> bool:
    return isinstance(noise, int | float) and noise == 0
