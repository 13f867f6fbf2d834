"""Problems on data that scikit-learn brings along: digits, their autoencoder, and diabetes."""

from typing import Any

import jax.numpy as jnp
import numpy as np

import natgrad as ng
from natgrad._problem import Problem
from natgrad.problems._perceptron import parted, perceptron, units


def sklearn_data(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of `digits` or `diabetes`."""
    try:
        import sklearn.datasets
    except ImportError as error:
        raise ImportError(
            f"The data of `{name}` come with scikit-learn, which is not installed. Install it with "
            "`pip install 'natgrad[data]'`, or choose a problem that needs no data, such as `rosenbrock`."
        ) from error
    load: Any = {"digits": sklearn.datasets.load_digits, "diabetes": sklearn.datasets.load_diabetes}[name]
    x, y = load(return_X_y=True)
    return np.asarray(x), np.asarray(y)


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
