"""The data sets that come with scikit-learn, which is optional."""

from typing import Any

import numpy as np


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
