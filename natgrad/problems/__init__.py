"""Ready-made problems, each a function of a random seed, and problems made from a data file."""

from collections.abc import Callable
from typing import NamedTuple

from natgrad._problem import Problem
from natgrad.problems._chars import chars as chars
from natgrad.problems._mnist import mnist_autoencoder as mnist_autoencoder
from natgrad.problems._poisson_pde import poisson_pde as poisson_pde
from natgrad.problems._rosenbrock import rosenbrock as rosenbrock
from natgrad.problems._sklearn import diabetes as diabetes
from natgrad.problems._sklearn import digits as digits
from natgrad.problems._sklearn import digits_autoencoder as digits_autoencoder
from natgrad.problems.tables import from_file as from_file


class ReadyMade(NamedTuple):
    """A ready-made problem of the command line.

    `make` takes a random seed. `is_double`: it needs double precision. `is_fetched`: its data are downloaded."""

    make: Callable[[int], Problem]
    about: str
    is_double: bool = False
    is_fetched: bool = False


PROBLEMS: dict[str, ReadyMade] = {
    "digits": ReadyMade(digits, "classification of 8 × 8 digits, MLP, batches of 128"),
    "digits-autoencoder": ReadyMade(digits_autoencoder, "autoencoder of 8 × 8 digits, bottleneck of 8, full batch"),
    "diabetes": ReadyMade(diabetes, "regression on 442 patients, MLP, full batch"),
    "rosenbrock": ReadyMade(rosenbrock, "Rosenbrock function in two dimensions, least squares", is_double=True),
    "poisson-pde": ReadyMade(
        poisson_pde, "physics-informed network for Poisson's equation on a square", is_double=True
    ),
    "mnist-autoencoder": ReadyMade(
        mnist_autoencoder, "autoencoder of MNIST, bottleneck of 30, full batch", is_fetched=True
    ),
    "chars": ReadyMade(chars, "next character of Moby-Dick, causal convolutions, batches of 64", is_fetched=True),
}
