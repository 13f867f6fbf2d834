"""Small models of every kind, for laws about metrics."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import natgrad as ng


class ModelCase(NamedTuple):
    """A model, its parameters, a batch, a geometry of its outputs, and a loss of one example that is convex in the
    output and has that geometry for its Hessian (None where there is none)."""

    model: Callable
    params: Any
    x: Any
    y: Any
    geometry: Any
    loss: Callable | None


def normal(seed: int, *shape: int) -> jax.Array:
    """The same numbers in either precision, without compiling a random generator."""
    return jnp.asarray(0.7 * np.random.default_rng(seed).normal(size=shape), jnp.result_type(float))


def dense(params, x):
    hidden = jnp.tanh(x @ params["w"] + params["b"][None, :])
    return hidden @ params["v"]


def dense_params():
    return {"w": normal(1, 3, 4), "b": normal(2, 4), "v": normal(3, 4, 3)}


def cross_entropy(z, y):
    return -ng.Categorical().log_prob(z, y)


def half_square(z, y):
    return jnp.sum((z - y) ** 2) / 2


def dense_case():
    return ModelCase(
        dense, dense_params(), normal(4, 5, 3), np.arange(5) % 3, ng.Fisher(ng.Categorical()), cross_entropy
    )


def least_squares_case():
    return ModelCase(dense, dense_params(), normal(4, 5, 3), normal(5, 5, 3), ng.Euclidean(), half_square)


def convolution(params, x):
    hidden = jax.lax.conv_general_dilated(
        x, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    pooled = jnp.mean(jax.nn.softplus(hidden), axis=(1, 2))
    return pooled @ params["head"] + params["bias"][None, :]


def convolution_case():
    params = {"kernel": normal(1, 2, 2, 1, 3), "head": normal(2, 3, 2), "bias": normal(3, 2)}
    loss = lambda z, y: -ng.Bernoulli().log_prob(z, y)
    return ModelCase(
        convolution,
        params,
        normal(4, 4, 4, 4, 1),
        np.array([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]]),
        ng.Fisher(ng.Bernoulli()),
        loss,
    )


def attention(params, x):
    q, k, v = (jnp.einsum("ntd,de->nte", x, w) for w in params["qkv"])
    weights = jax.nn.softmax(jnp.einsum("nte,nse->nts", q, k), axis=-1)
    return jnp.einsum("nts,nse->nte", weights, v) @ params["out"]


def attention_case():
    params = {"qkv": (normal(1, 2, 3), normal(2, 2, 3), normal(3, 2, 3)), "out": normal(4, 3, 2)}
    loss = lambda z, y: cross_entropy(z, y)
    y = np.arange(12).reshape(4, 3) % 2
    return ModelCase(attention, params, normal(5, 4, 3, 2), y, ng.Fisher(ng.Categorical()), loss)


def recurrent(params, x):
    def cell(state, inputs):
        state = jnp.tanh(inputs @ params["in"] + state @ params["state"])
        return state, None

    start = jnp.broadcast_to(params["start"], (x.shape[0], params["start"].shape[0]))
    state, _ = jax.lax.scan(cell, start, jnp.swapaxes(x, 0, 1))
    return {"rate": state[:, 0], "place": state[:, 1:]}


def recurrent_case():
    params = {"in": normal(1, 2, 3), "state": normal(2, 3, 3), "start": normal(3, 3)}
    geometry = ng.ProductGeometry({"rate": ng.Fisher(ng.Poisson()), "place": 2.0 * ng.Euclidean()})
    loss = lambda z, y: -ng.Poisson().log_prob(z["rate"], y["rate"]) + jnp.sum((z["place"] - y["place"]) ** 2)
    y = {"rate": np.arange(4.0), "place": normal(6, 4, 2)}
    return ModelCase(recurrent, params, normal(5, 4, 3, 2), y, geometry, loss)


def charted_case():
    """A geometry that is not the Hessian of a loss: deviations by way of a chart, and a dissimilarity by hand."""
    chart = lambda z: (z[:1] * jnp.exp(-2 * z[1:2]), jnp.exp(-2 * z[1:2])[None])
    params = {"w": normal(1, 3, 2), "b": normal(2, 2)}
    model = lambda params, x: jnp.sin(x @ params["w"]) + params["b"][None, :]
    return ModelCase(model, params, normal(4, 5, 3), None, ng.Fisher(ng.Gaussian(1), chart=chart), None)


def dissimilar_case():
    rho = lambda z, z0: jnp.sum(jnp.cosh(z - z0) * (1 + z0**2) - (1 + z0**2))
    params = {"w": normal(1, 3, 2), "b": normal(2, 2)}
    model = lambda params, x: jnp.sin(x @ params["w"]) + params["b"][None, :]
    return ModelCase(model, params, normal(4, 5, 3), None, ng.Dissimilarity(rho), None)


MODELS: dict[str, Callable[[], ModelCase]] = {
    "dense": dense_case,
    "least_squares": least_squares_case,
    "convolution": convolution_case,
    "attention": attention_case,
    "recurrent": recurrent_case,
    "charted": charted_case,
    "dissimilar": dissimilar_case,
}

WITH_LOSS = [name for name in MODELS if name not in ("charted", "dissimilar")]
