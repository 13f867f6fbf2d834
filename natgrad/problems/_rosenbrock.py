"""The curved valley that optimisers are tried on."""

import jax.numpy as jnp
import numpy as np

import natgrad as ng
from natgrad._problem import Problem

START = (-1.2, 1.0)


def residuals(params):
    u, v = params
    return jnp.stack([1 - u, 10 * (v - u**2)])


def rosenbrock(seed: int = 0) -> Problem:
    r"""Half the squares of $1 - u$ and $10\,(v - u^2)$, from (-1.2, 1), and with other seeds than 0 from near it."""
    beside = 0.1 * np.random.default_rng(seed).standard_normal(2) if seed else 0.0
    return Problem(
        residuals,
        ng.LeastSquares(),
        jnp.asarray(np.array(START) + beside, float),
        (None, jnp.zeros(2)),
        metrics={},
        steps=200,
        name="rosenbrock",
        about="The function of Rosenbrock, a curved valley, as the residuals 1 - u and 10 (v - u²) from (-1.2, 1). Its "
        "minimum is 0 at (1, 1).",
    )
