"""The reduced autoencoder of MNIST, on which methods of second order are usually compared."""

import jax.numpy as jnp

import natgrad as ng
from natgrad._problem import Problem
from natgrad.problems._perceptron import perceptron
from natgrad.problems.data import mnist_test_images

TRAINING = 2000
HELD_OUT = 1000


def mnist_autoencoder(seed: int = 0) -> Problem:
    """Images of 28 × 28 pixels through a code of thirty numbers: 784-250-100-30-100-250-784, all images at once."""
    images = mnist_test_images()
    parts = images[:TRAINING], images[TRAINING : TRAINING + HELD_OUT]
    training, held_out = (jnp.asarray(part, float) for part in parts)
    model, params = perceptron((784, 250, 100, 30, 100, 250, 784), seed, linear=(2,))
    return Problem(
        model,
        ng.Bernoulli(),
        params,
        (training, training),
        held_out=(held_out, held_out),
        steps=100,
        name="mnist-autoencoder",
        about="2000 test images of MNIST through a code of thirty numbers, by a perceptron 784-250-100-30-100-250-784 "
        "with tanh and a linear code. Pixels are probabilities of ink; 1000 further images are held out.",
    )
