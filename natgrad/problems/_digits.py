"""Problems on the 1797 digits, 8 × 8 pixels each, that scikit-learn has inside."""

import jax.numpy as jnp

import natgrad as ng
from natgrad._problem import Problem
from natgrad.problems._parts import parted
from natgrad.problems._perceptron import perceptron
from natgrad.problems._sklearn import sklearn_data


def digits(seed: int = 0) -> Problem:
    """Which digit it is: a perceptron, 64-64-32-10, in batches of 128."""
    x, y = sklearn_data("digits")
    model, params = perceptron((64, 64, 32, 10), seed)
    data, held_out = ((jnp.asarray(x[rows] / 16, float), jnp.asarray(y[rows], jnp.int32)) for rows in parted(len(x)))
    return Problem(
        model,
        ng.Categorical(),
        params,
        data,
        batch_size=128,
        held_out=held_out,
        steps=500,
        name="digits",
        about="Digits of 8 × 8 pixels into ten classes, by a perceptron 64-64-32-10 with tanh, in batches of 128. A "
        "fifth of the 1797 images is held out.",
    )


def digits_autoencoder(seed: int = 0) -> Problem:
    """The digits through a code of eight numbers: 64-48-24-8-24-48-64, all images at once."""
    x, _ = sklearn_data("digits")
    model, params = perceptron((64, 48, 24, 8, 24, 48, 64), seed, linear=(2,))
    data, held_out = ((pixels, pixels) for pixels in (jnp.asarray(x[rows] / 16, float) for rows in parted(len(x))))
    return Problem(
        model,
        ng.Bernoulli(),
        params,
        data,
        held_out=held_out,
        steps=150,
        name="digits-autoencoder",
        about="Digits of 8 × 8 pixels through a code of eight numbers, by a perceptron 64-48-24-8-24-48-64 with tanh "
        "and a linear code. Pixels are probabilities of ink; a fifth of the 1797 images is held out.",
    )
