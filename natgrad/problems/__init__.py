"""Ready-made problems, and problems made from a file of data."""

from collections.abc import Callable
from typing import NamedTuple

from natgrad._problem import Problem
from natgrad.problems._chars import chars as chars
from natgrad.problems._mnist import mnist_autoencoder as mnist_autoencoder
from natgrad.problems._poisson import poisson_pde as poisson_pde
from natgrad.problems._rosenbrock import rosenbrock as rosenbrock
from natgrad.problems._sklearn import diabetes as diabetes
from natgrad.problems._sklearn import digits as digits
from natgrad.problems._sklearn import digits_autoencoder as digits_autoencoder
from natgrad.problems.tables import from_file as from_file


class Embedded(NamedTuple):
    """A ready-made problem: how to make it from a seed, what it is, whether it wants double precision, and whether
    its data are fetched."""

    make: Callable[[int], Problem]
    about: str
    is_double: bool = False
    is_fetched: bool = False


PROBLEMS: dict[str, Embedded] = {
    "digits": Embedded(digits, "8 × 8 digits into ten classes, perceptron, small batches"),
    "digits-autoencoder": Embedded(digits_autoencoder, "8 × 8 digits through a code of eight numbers, whole batch"),
    "diabetes": Embedded(diabetes, "regression on 442 patients, perceptron, whole batch"),
    "rosenbrock": Embedded(rosenbrock, "the curved valley in two dimensions, least squares", is_double=True),
    "poisson-pde": Embedded(poisson_pde, "the equation of Poisson on a square, by a network", is_double=True),
    "mnist-autoencoder": Embedded(
        mnist_autoencoder, "MNIST through a code of thirty numbers, whole batch", is_fetched=True
    ),
    "chars": Embedded(chars, "the next character of Moby-Dick, causal convolutions, small batches", is_fetched=True),
}
