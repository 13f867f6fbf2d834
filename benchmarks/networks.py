"""Networks to measure on, beyond the perceptron of `products`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from products import Case


def convolutional(batch: int = 128, channels: tuple[int, int] = (16, 32)) -> Case:
    """Images of 28 × 28, two 3 × 3 convolutions with ReLU and max-pooling, and a linear layer to ten classes."""
    keys = iter(jax.random.split(jax.random.key(0), 5))
    first, second = channels
    params = {
        "first": {"w": jax.random.normal(next(keys), (3, 3, 1, first)) / 3, "b": jnp.zeros(first)},
        "second": {
            "w": jax.random.normal(next(keys), (3, 3, first, second)) / (3 * first**0.5),
            "b": jnp.zeros(second),
        },
        "head": {"w": jax.random.normal(next(keys), (49 * second, 10)) / (7 * second**0.5), "b": jnp.zeros(10)},
    }

    def convolve(x, layer):
        y = jax.lax.conv_general_dilated(x, layer["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        y = jax.nn.relu(y + layer["b"])
        return jax.lax.reduce_window(y, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def model(params, x):
        hidden = convolve(convolve(x, params["first"]), params["second"])
        return hidden.reshape(len(x), -1) @ params["head"]["w"] + params["head"]["b"]

    x = jax.random.normal(next(keys), (batch, 28, 28, 1))
    return Case(model, params, x, jax.random.randint(next(keys), (batch,), 0, 10))


def decoder(
    layers: int = 4,
    width: int = 128,
    heads: int = 4,
    positions: int = 32,
    words: int = 500,
    batch: int = 32,
    *,
    is_rematerialised: bool = False,
    key: jax.Array | None = None,
) -> Case:
    """A causal transformer with biases, layer norms, and a table of words that is also the head. Layers are stacked and
    scanned over."""
    keys = iter(jax.random.split(jax.random.key(0) if key is None else key, 8))
    matrix = lambda *shape: jax.random.normal(next(keys), shape) * shape[-2] ** -0.5
    vector = lambda size: jnp.zeros((layers, size))
    params = {
        "words": matrix(words, width),
        "places": matrix(positions, width),
        "blocks": {
            "norm": {"scale": vector(width) + 1, "shift": vector(width)},
            "qkv": {"w": matrix(layers, width, 3 * width), "b": vector(3 * width)},
            "join": matrix(layers, width, width),
            "second_norm": {"scale": vector(width) + 1, "shift": vector(width)},
            "up": {"w": matrix(layers, width, 4 * width), "b": vector(4 * width)},
            "down": {"w": matrix(layers, 4 * width, width), "b": vector(width)},
        },
    }
    causal = jnp.tril(jnp.ones((positions, positions), bool))

    def normalise(h, norm):
        h = h - jnp.mean(h, axis=-1, keepdims=True)
        h = h * jax.lax.rsqrt(jnp.mean(h**2, axis=-1, keepdims=True) + 1e-5)
        return h * norm["scale"] + norm["shift"]

    def layer(h, block):
        split = normalise(h, block["norm"]) @ block["qkv"]["w"] + block["qkv"]["b"]
        q, k, v = jnp.moveaxis(split.reshape(*h.shape[:2], 3, heads, -1), 2, 0)
        scores = jnp.einsum("nthd,nshd->nhts", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
        h = h + jnp.einsum("nhts,nshd->nthd", weights, v).reshape(h.shape) @ block["join"]
        hidden = jax.nn.gelu(normalise(h, block["second_norm"]) @ block["up"]["w"] + block["up"]["b"])
        return h + hidden @ block["down"]["w"] + block["down"]["b"], None

    def model(params, x):
        h = params["words"][x] + params["places"]
        h, _ = jax.lax.scan(jax.checkpoint(layer) if is_rematerialised else layer, h, params["blocks"])
        return h @ params["words"].T

    x, y = jax.random.randint(next(keys), (2, batch, positions), 0, words)
    return Case(model, params, x, y)


def tanh_perceptron(sizes: tuple[int, ...]) -> tuple[Callable, list[tuple[jax.Array, jax.Array]]]:
    """A perceptron with tanh between its layers, and parameters for it."""
    keys = jax.random.split(jax.random.key(0), len(sizes) - 1)
    shapes = zip(keys, sizes[:-1], sizes[1:], strict=True)
    params = [(jax.random.normal(key, (a, b)) / a**0.5, jnp.zeros(b)) for key, a, b in shapes]

    def model(params, x):
        for k, (w, b) in enumerate(params):
            x = x @ w + b
            x = x if k == len(params) - 1 else jnp.tanh(x)
        return x

    return model, params
