"""Problems on data sets of scikit-learn: digits, an autoencoder of the digits, and diabetes."""

from typing import Any

import jax.numpy as jnp
import numpy as np

import natgrad as ng
from natgrad._problem import Problem
from natgrad.problems._mlp import column_scaling, mlp, split_examples


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
    """Classify 8 × 8 images of digits: MLP 64-64-32-10, batches of 128.

    `seed` (default 0) is the random seed of the initial parameters."""
    x, y = sklearn_data("digits")
    model, params = mlp((64, 64, 32, 10), seed)
    data, held_out = (
        (jnp.asarray(x[rows] / 16, float), jnp.asarray(y[rows], jnp.int32)) for rows in split_examples(len(x))
    )
    return Problem(
        model,
        ng.Categorical(),
        params,
        data,
        batch_size=128,
        held_out=held_out,
        steps=500,
        name="digits",
        about="Classification of 8 × 8 digits: MLP 64-64-32-10, tanh, batches of 128. A fifth of the 1797 images is "
        "held out.",
    )


def digits_autoencoder(seed: int = 0) -> Problem:
    """Autoencoder of the digits with a bottleneck of 8: MLP 64-48-24-8-24-48-64, full batch.

    `seed` (default 0) is the random seed of the initial parameters."""
    x, _ = sklearn_data("digits")
    model, params = mlp((64, 48, 24, 8, 24, 48, 64), seed, linear=(2,))
    data, held_out = (
        (pixels, pixels) for pixels in (jnp.asarray(x[rows] / 16, float) for rows in split_examples(len(x)))
    )
    return Problem(
        model,
        ng.Bernoulli(),
        params,
        data,
        held_out=held_out,
        steps=150,
        name="digits-autoencoder",
        about="Autoencoder of 8 × 8 digits: MLP 64-48-24-8-24-48-64, tanh, linear bottleneck of 8. Targets are pixel "
        "intensities as Bernoulli probabilities; a fifth of the 1797 images is held out.",
    )


def diabetes(seed: int = 0) -> Problem:
    """Predict the progression of diabetes after a year: MLP 10-32-32-1, full batch.

    `seed` (default 0) is the random seed of the initial parameters."""
    x, y = sklearn_data("diabetes")
    y = y[:, None]
    split = split_examples(len(x))
    x, y = (column_scaling(values[split.training]).standardise(values) for values in (x, y))
    data, held_out = ((jnp.asarray(x[rows], float), jnp.asarray(y[rows], float)) for rows in split)
    model, params = mlp((10, 32, 32, 1), seed)
    return Problem(
        model,
        ng.LeastSquares(),
        params,
        data,
        held_out=held_out,
        steps=200,
        name="diabetes",
        about="Regression of the progression of diabetes on ten measurements: MLP 10-32-32-1, tanh, least squares. "
        "Inputs and target are standardised; a fifth of the 442 patients is held out.",
    )
