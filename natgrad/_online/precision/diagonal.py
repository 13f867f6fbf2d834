import jax.numpy as jnp

from natgrad._online.precision.base import AbstractPrecision


class DiagonalPrecision(AbstractPrecision):
    """Its diagonal only, in the memory of the parameters."""

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
