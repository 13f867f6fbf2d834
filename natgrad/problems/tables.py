"""Problems made from a data file: an MLP that predicts one column from the others."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import natgrad as ng
from natgrad._check import caller, public
from natgrad._problem import Problem, explained_variance
from natgrad.problems._mlp import Split, column_scaling, mlp, split_examples
from natgrad.problems._readers import Table, did_you_mean, quoted, read_csv, read_idx, read_npz

READERS: dict[str, Callable[[Path, str | None, Sequence[str]], Table]] = {
    r"\.csv(\.gz)?": read_csv,
    r"\.npz": read_npz,
    r"[-.]idx\d-ubyte(\.gz)?": read_idx,
}
TASKS = ("classification", "regression")
# With the default split, two rows are held out: fewer say nothing.
MIN_ROWS = 10
# How many distinct integers still count as labels: in a column of text, which may also hold counts or measurements, and
# in an array of integers.
MAX_CLASSES, MAX_LABELS = 20, 1000
# Above this many rows, steps see batches of this size.
WHOLE_BATCH, BATCH = 2000, 256


class Prediction(NamedTuple):
    """What to predict: targets, objective, number of outputs, metrics, and a description for the report."""

    target: np.ndarray
    objective: Any
    num_outputs: int
    metrics: dict[str, Callable] | None
    about: str


@public
def from_file(
    path: Any,
    *,
    target: Any,
    hidden: tuple[int, ...] = (64, 64),
    seed: int = 0,
    held_out: float = 0.2,
    batch_size: int | None = None,
    task: Any = None,
    ignore: Sequence[str] = (),
) -> Problem:
    """An MLP with tanh that predicts one column of a data file from the others.

    Inputs are standardised by the mean and the standard deviation of the training rows; images are scaled to [0, 1].

    **Arguments:**

    - `path`: a table with a header (`.csv` or `.csv.gz`), an archive of arrays (`.npz`), or images in IDX format.
    - `target`: the column or array to predict; for IDX, the file of labels.
    - `hidden`: widths of the hidden layers, by default `(64, 64)`.
    - `seed`: random seed of the initial parameters and of the split, by default 0.
    - `held_out`: fraction of the rows that is held out, by default 0.2.
    - `batch_size`: by default all rows up to 2000, and 256 if there are more.
    - `task`: `"classification"` or `"regression"`. By default classification if the target is text or has few
      different integers.
    - `ignore`: columns or arrays that are not inputs.

    ```python
    problem = from_file("houses.csv", target="price", hidden=(64, 64), ignore=["id"])
    optimiser = ng.NaturalGradient(problem.model, problem.objective)
    ```
    """
    path = Path(path)
    check_options(hidden, held_out, task)
    source = reader(path)(path, target, ignore)
    check_rows(source, path)
    split = split_examples(len(source.target), held_out, seed)
    inputs = source.inputs
    if not source.is_scaled:
        # By the training rows alone, so that nothing of the held-out rows is known.
        inputs = column_scaling(inputs[split.training]).standardise(inputs)
    prediction = choose_task(source, split, task)
    data, held_out_data = ((jnp.asarray(inputs[rows], float), jnp.asarray(prediction.target[rows])) for rows in split)
    model, params = mlp((inputs.shape[1], *hidden, prediction.num_outputs), seed)
    default_batch = BATCH if len(split.training) > WHOLE_BATCH else None
    return Problem(
        model,
        prediction.objective,
        params,
        data,
        batch_size=default_batch if batch_size is None else batch_size,
        held_out=held_out_data if len(split.held_out) else None,
        metrics=prediction.metrics,
        steps=500,
        name=path.name,
        about=description(source, split, prediction),
    )


def check_options(hidden: tuple[int, ...], held_out: float, task: Any) -> None:
    if any(size < 1 for size in hidden):
        raise ValueError(f"{caller()} needs hidden layers of at least one unit each, but `hidden` is {hidden}.")
    if not 0 <= held_out <= 0.9:
        raise ValueError(f"{caller()} needs `held_out` to be a fraction of the rows from 0 to 0.9, but got {held_out}.")
    if task not in (None, *TASKS):
        raise ValueError(f"{caller()} needs `task` to be {quoted(TASKS)} or left out, but got `{task}`.")


def reader(path: Path) -> Callable[[Path, str | None, Sequence[str]], Table]:
    """The function that reads a file, by the end of its name; raises if there is no such file."""
    if path.is_dir():
        raise ValueError(f"`{path}` is a folder. Name a file in it.")
    if not path.is_file():
        if not path.parent.is_dir():
            raise FileNotFoundError(f"There is no file `{path}`. There is no folder `{path.parent}` either.")
        neighbours = sorted(file.name for file in path.parent.iterdir())
        raise FileNotFoundError(f"There is no file `{path}`.{did_you_mean(path.name, neighbours)}")
    for ending, read in READERS.items():
        if re.search(f"{ending}$", path.name, re.IGNORECASE):
            return read
    raise ValueError(
        f"`{path}` ends in none of `.csv`, `.csv.gz`, `.npz` and `-idx3-ubyte` (also with `.gz`), the formats that can "
        "be read. Convert it to one of these, or write your own `ng.Problem`."
    )


def check_rows(source: Table, path: Path) -> None:
    rows, columns = source.inputs.shape
    if rows < MIN_ROWS:
        raise ValueError(f"`{path}` has {rows} rows of data, but at least {MIN_ROWS} are needed.")
    if columns == 0:
        raise ValueError(f"`{path}` has no inputs besides the target `{source.target_name}` and the ignored columns.")


def choose_task(source: Table, split: Split, task: str | None) -> Prediction:
    """Classification or regression, as asked for or else as the target suggests."""
    is_classification = looks_like_labels(source.target) if task is None else task == "classification"
    return classification(source) if is_classification else regression(source, split)


def looks_like_labels(target: np.ndarray) -> bool:
    """Whether a target is text, or integers with few different values compared with the rows."""
    if target.dtype.kind in "US":
        return True
    is_integer = target.dtype.kind in "biu"
    count = len(np.unique(target))
    # Fewer different floats count as labels: whole floats may be measurements.
    is_few = count <= (MAX_LABELS if is_integer else MAX_CLASSES) and count < len(target) / 10
    return is_few and (is_integer or bool(np.all(target == np.round(target))))


def classification(source: Table) -> Prediction:
    """Predict the classes, numbered in the order of their names."""
    classes, labels = np.unique(source.target, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(
            f"The target `{source.target_name}` is `{classes[0]}` in all rows: there is only one class, so there "
            "is nothing to learn. Choose another target."
        )
    about = f"classification of `{source.target_name}`, {len(classes)} classes"
    return Prediction(labels.astype(np.int32), ng.Categorical(), len(classes), None, about)


def regression(source: Table, split: Split) -> Prediction:
    """Predict the target in units of its standard deviation."""
    if source.target.dtype.kind in "US":
        raise ValueError(
            f"The target `{source.target_name}` has text, such as `{source.target[0]}`, so regression is not "
            'possible. Leave `task` out, or pass `task="classification"`.'
        )
    values = source.target.astype(np.float64)[:, None]
    # Held-out rows must not influence the scaling.
    training = values[split.training]
    if np.ptp(training) == 0:
        raise ValueError(
            f"The target `{source.target_name}` is {training[0, 0]:g} in all training rows: it is constant, so there "
            "is nothing to learn. Choose another target."
        )
    scaling = column_scaling(training)
    unit = float(scaling.standard_deviation[0])

    def root_mean_squared_error(z, y):
        return unit * jnp.sqrt(jnp.mean((z - y) ** 2))

    metrics = {"explained variance": explained_variance, "root mean squared error": root_mean_squared_error}
    about = f"regression of `{source.target_name}` in units of its standard deviation, {unit:.4g}"
    target = scaling.standardise(values).astype(jnp.zeros(()).dtype)
    return Prediction(target, ng.LeastSquares(), 1, metrics, about)


def description(source: Table, split: Split, prediction: Prediction) -> str:
    """The sentence about the problem in a report."""
    rows, columns = source.inputs.shape
    scale = "scaled to [0, 1]" if source.is_scaled else "standardised by the training rows"
    unused = (
        f" Not used, because their lengths differ from the target: {quoted(source.left_out)}."
        if source.left_out
        else ""
    )
    return (
        f"{rows} rows with {columns} inputs, {scale}; {prediction.about}; {len(split.training)} training rows and "
        f"{len(split.held_out)} held out.{unused}"
    )
