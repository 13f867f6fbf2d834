"""Least squares on the 442 patients that scikit-learn has inside."""

import jax.numpy as jnp

import natgrad as ng
from natgrad._problem import Problem
from natgrad.problems._parts import parted, units
from natgrad.problems._perceptron import perceptron
from natgrad.problems._sklearn import sklearn_data


def diabetes(seed: int = 0) -> Problem:
    """The progress of a disease after a year: a perceptron, 10-32-32-1, all patients at once."""
    x, y = sklearn_data("diabetes")
    y = y[:, None]
    parts = parted(len(x))
    of_x, of_y = units(x[parts.training]), units(y[parts.training])
    data, held_out = (
        (jnp.asarray(of_x.standardised(x[rows]), float), jnp.asarray(of_y.standardised(y[rows]), float))
        for rows in parts
    )
    model, params = perceptron((10, 32, 32, 1), seed)
    return Problem(
        model,
        ng.LeastSquares(),
        params,
        data,
        held_out=held_out,
        steps=200,
        name="diabetes",
        about="The progress of diabetes from ten measurements, by a perceptron 10-32-32-1 with tanh and least squares. "
        "Inputs and target are standardised; a fifth of the 442 patients is held out.",
    )
