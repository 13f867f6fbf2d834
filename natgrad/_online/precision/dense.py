import jax.numpy as jnp
import jax.scipy.linalg as jsp

from natgrad._online.precision.base import AbstractPrecision, identity_plus, symmetric


class DensePrecision(AbstractPrecision):
    r"""All of it, as a covariance matrix: the extended Kalman filter. A step costs $P^2$ for every row."""

    def init(self, precision):
        return jnp.diag(1 / precision)

    def faded(self, state, forget, noise):
        return state / forget + noise * jnp.eye(len(state), dtype=state.dtype)

    def grown(self, state, rows):
        crossed = rows @ state
        gain = jsp.cho_solve(jsp.cho_factor(identity_plus(symmetric(crossed @ rows.T))), crossed)
        return symmetric(state - crossed.T @ gain)

    def solve(self, state, covector):
        return state @ covector

    def covariance(self, state):
        return state
