"""Your problem, for `natgrad compare` and `natgrad train`."""

import jax
import jax.numpy as jnp

import natgrad as ng


def model(params, x):
    """Outputs for a batch of inputs, one row for each example: here the logits of two classes."""
    hidden = jnp.tanh(x @ params["in"]["w"] + params["in"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def problem(seed=0):
    # Replace x and y by your data, with examples along the leading axis. They have to fit into memory.
    x = jax.random.normal(jax.random.key(1), (600, 2))
    y = (x[:, 1] > jnp.sin(3 * x[:, 0])).astype(int)

    first, second = jax.random.split(jax.random.key(seed))
    params = {
        "in": {"w": jax.random.normal(first, (2, 32)) / 2**0.5, "b": jnp.zeros(32)},
        "out": {"w": jax.random.normal(second, (32, 2)) / 32**0.5, "b": jnp.zeros(2)},
    }
    return ng.Problem(
        model,
        # What the outputs mean: `ng.Categorical()`, `ng.Bernoulli()`, `ng.Poisson()`, `ng.LeastSquares()`,
        # or `ng.Objective(loss, geometry)` with any loss of one example and any geometry.
        ng.Categorical(),
        params,
        (x[:500], y[:500]),
        held_out=(x[500:], y[500:]),
        batch_size=None,  # all examples at every step; or the size of small batches
        steps=100,
        name="two classes",
    )
