"""The next character of a book, by causal convolutions."""

import jax
import jax.numpy as jnp
import numpy as np

import natgrad as ng
from natgrad._problem import Problem
from natgrad.problems._perceptron import affine, layer, normal
from natgrad.problems.data import in_numbers, moby_dick

WINDOW = 32
FEATURES = 32
CHANNELS = 64
WIDTH = 4
# The second convolution sees every fourth position, so that the two together see 16 characters.
DILATIONS = (1, 4)
CHARACTERS = 500_000


def convolution(layer, x, dilation: int):
    """The outputs at a position depend on the inputs there and before."""
    z = jax.lax.conv_general_dilated(
        x,
        layer["w"],
        window_strides=(1,),
        padding=[(dilation * (WIDTH - 1), 0)],
        rhs_dilation=(dilation,),
        dimension_numbers=("NTC", "TIO", "NTC"),
    )
    return z + layer["b"]


def model(params, x):
    h = params["table"][x]
    for each, dilation in zip(params["convolutions"], DILATIONS, strict=True):
        h = jnp.tanh(convolution(each, h, dilation))
    return affine(params["last"], h)


def initial(seed: int, characters: int):
    random = np.random.default_rng(seed)

    def kernel(inputs):
        weights = layer(random, WIDTH * inputs, CHANNELS)
        return weights | {"w": weights["w"].reshape(WIDTH, inputs, CHANNELS)}

    return {
        "table": normal(random, (characters, FEATURES), 1.0),
        "convolutions": [kernel(FEATURES), kernel(CHANNELS)],
        "last": layer(random, CHANNELS, characters),
    }


def chars(seed: int = 0) -> Problem:
    """The next character of Moby-Dick from the 16 before it, in batches of 64 windows of 32 characters."""
    text, characters = in_numbers(moby_dick()[:CHARACTERS])
    windows = text[: len(text) // (WINDOW + 1) * (WINDOW + 1)].reshape(-1, WINDOW + 1)
    parts = np.split(windows, [len(windows) * 9 // 10])
    data, held_out = ((jnp.asarray(part[:, :-1]), jnp.asarray(part[:, 1:])) for part in parts)
    return Problem(
        model,
        ng.Categorical(),
        initial(seed, characters),
        data,
        batch_size=64,
        held_out=held_out,
        steps=300,
        name="chars",
        about=f"The next character of Moby-Dick, one of {characters}, by two causal convolutions that see 16 "
        f"characters, in batches of 64 windows of {WINDOW}. The last tenth of half a million characters is held out.",
    )
