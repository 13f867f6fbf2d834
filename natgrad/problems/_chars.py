"""Predict the next character of Moby-Dick with causal convolutions."""

import jax
import jax.numpy as jnp
import numpy as np

import natgrad as ng
from natgrad._problem import Problem
from natgrad.problems._mlp import LayerParams, affine, layer_params, normal
from natgrad.problems.data import in_numbers, moby_dick

WINDOW = 32
FEATURES = 32
CHANNELS = 64
WIDTH = 4
# The second convolution sees every fourth position, so that the two together see 16 characters.
DILATIONS = (1, 4)
CHARACTERS = 500_000


def convolution(params, x, dilation: int):
    """A causal convolution: outputs at a position depend on inputs there and before."""
    z = jax.lax.conv_general_dilated(
        x,
        params["w"],
        window_strides=(1,),
        padding=[(dilation * (WIDTH - 1), 0)],
        rhs_dilation=(dilation,),
        dimension_numbers=("NTC", "TIO", "NTC"),
    )
    return z + params["b"]


def model(params, x):
    """Logits of the next character at every position."""
    h = params["table"][x]
    for layer, dilation in zip(params["convolutions"], DILATIONS, strict=True):
        h = jnp.tanh(convolution(layer, h, dilation))
    return affine(params["last"], h)


def initial_params(seed: int, characters: int):
    """Weights that keep the variance of their inputs, and biases of zero."""
    random = np.random.default_rng(seed)

    def kernel(inputs: int) -> LayerParams:
        dense = layer_params(random, WIDTH * inputs, CHANNELS)
        return dense | {"w": dense["w"].reshape(WIDTH, inputs, CHANNELS)}

    return {
        "table": normal(random, (characters, FEATURES), 1.0),
        "convolutions": [kernel(FEATURES), kernel(CHANNELS)],
        "last": layer_params(random, CHANNELS, characters),
    }


def chars(seed: int = 0) -> Problem:
    """Predict the next character of Moby-Dick from the 16 before it, in batches of 64 windows of 32 characters.

    `seed` (default 0) is the random seed of the initial parameters. The book is downloaded at the first call."""
    text, characters = in_numbers(moby_dick()[:CHARACTERS])
    windows = text[: len(text) // (WINDOW + 1) * (WINDOW + 1)].reshape(-1, WINDOW + 1)
    subsets = np.split(windows, [len(windows) * 9 // 10])
    data, held_out = ((jnp.asarray(subset[:, :-1]), jnp.asarray(subset[:, 1:])) for subset in subsets)
    return Problem(
        model,
        ng.Categorical(),
        initial_params(seed, characters),
        data,
        batch_size=64,
        held_out=held_out,
        steps=300,
        name="chars",
        about=f"Next character of Moby-Dick ({characters} classes), two causal convolutions that see 16 characters, "
        f"batches of 64 windows of {WINDOW}. The last tenth of half a million characters is held out.",
    )
