"""A perceptron and its initial parameters, which NumPy draws: JAX would compile a program for every shape."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

Layer = dict[str, Float[Array, "..."]]


def normal(random: np.random.Generator, shape: tuple[int, ...], deviation: float) -> Float[Array, "..."]:
    return jnp.asarray(deviation * random.standard_normal(shape), float)


def layer(random: np.random.Generator, inputs: int, outputs: int) -> Layer:
    """Weights whose outputs vary as much as their inputs, and no bias."""
    return {"w": normal(random, (inputs, outputs), inputs**-0.5), "b": jnp.asarray(np.zeros(outputs), float)}


def affine(layer: Layer, x: Float[Array, "... inputs"]) -> Float[Array, "... outputs"]:
    return x @ layer["w"] + layer["b"]


def perceptron(sizes: tuple[int, ...], seed: int, linear: tuple[int, ...] = ()) -> tuple[Callable, list[Layer]]:
    """Layers with tanh between them, except after those that are `linear`, and parameters for them."""
    last = len(sizes) - 2

    def model(params, x):
        for number, each in enumerate(params):
            x = affine(each, x)
            x = x if number in (*linear, last) else jnp.tanh(x)
        return x

    random = np.random.default_rng(seed)
    return model, [layer(random, *pair) for pair in zip(sizes[:-1], sizes[1:], strict=True)]
