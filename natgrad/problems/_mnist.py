"""A smaller version of the MNIST autoencoder on which second-order methods are usually compared."""

import jax.numpy as jnp

import natgrad as ng
from natgrad._problem import Problem
from natgrad.problems._mlp import mlp
from natgrad.problems.data import mnist_test_images

TRAINING = 2000
HELD_OUT = 1000


def mnist_autoencoder(seed: int = 0) -> Problem:
    """Autoencoder of 28 × 28 images with a bottleneck of 30: MLP 784-250-100-30-100-250-784, full batch.

    `seed` (default 0) is the random seed of the initial parameters. The images are downloaded at the first call."""
    images = mnist_test_images()
    training = jnp.asarray(images[:TRAINING], float)
    held_out = jnp.asarray(images[TRAINING : TRAINING + HELD_OUT], float)
    model, params = mlp((784, 250, 100, 30, 100, 250, 784), seed, linear=(2,))
    return Problem(
        model,
        ng.Bernoulli(),
        params,
        (training, training),
        held_out=(held_out, held_out),
        steps=100,
        name="mnist-autoencoder",
        about="Autoencoder of 2000 MNIST test images: MLP 784-250-100-30-100-250-784, tanh, linear bottleneck of 30. "
        "Targets are pixel intensities as Bernoulli probabilities; 1000 further images are held out.",
    )
