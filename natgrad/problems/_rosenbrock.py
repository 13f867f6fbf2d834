r"""The Rosenbrock function as least squares: residuals $1 - u$ and $10\,(v - u^2)$, a curved valley."""

import jax.numpy as jnp
import numpy as np

import natgrad as ng
from natgrad._problem import Problem

START = (-1.2, 1.0)


def residuals(params):
    u, v = params
    return jnp.stack([1 - u, 10 * (v - u**2)])


def rosenbrock(seed: int = 0) -> Problem:
    r"""Minimise $\frac12(1 - u)^2 + \frac12\,10^2(v - u^2)^2$ from (-1.2, 1), or from near it if `seed` is not 0."""
    offset = 0.1 * np.random.default_rng(seed).standard_normal(2) if seed else 0.0
    return Problem(
        residuals,
        ng.LeastSquares(),
        jnp.asarray(np.array(START) + offset, float),
        (None, jnp.zeros(2)),
        metrics={},
        steps=200,
        name="rosenbrock",
        about="Rosenbrock function, a curved valley, as least squares with the residuals 1 - u and 10 (v - u²), from "
        "(-1.2, 1). The minimum is 0 at (1, 1).",
    )
