"""Problems made from a file: a perceptron that predicts one column from the others."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

import natgrad as ng
from natgrad._problem import Problem, explained_variance
from natgrad.problems._perceptron import Split, parted, perceptron, units
from natgrad.problems._readers import Table, close, quoted, read_csv, read_idx, read_npz

READERS: dict[str, Callable[[Path, str | None, Sequence[str]], Table]] = {
    r"\.csv(\.gz)?": read_csv,
    r"\.npz": read_npz,
    r"[-.]idx\d-ubyte(\.gz)?": read_idx,
}
TASKS = ("classification", "regression")
MIN_ROWS = 10
# Integers are labels if there are at most so many: of columns, which may count or measure, and of integer arrays.
MAX_CLASSES, MAX_LABELS = 20, 1000
# From this many rows on, steps see batches.
WHOLE_BATCH, BATCH = 2000, 256


class Aim(NamedTuple):
    """What is predicted: targets, the objective, how many outputs it takes, how to judge them, and its description."""

    target: np.ndarray
    objective: Any
    num_outputs: int
    metrics: dict[str, Callable] | None
    about: str


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
    """A perceptron with tanh for the data in a file.

    **Arguments:**

    - `path`: a table with a header, `.csv` or `.csv.gz`; an archive of arrays, `.npz`; or images in IDX format.
    - `target`: the column or array to predict; of IDX, the file of labels.
    - `hidden`: the sizes of the hidden layers.
    - `seed`: of the initial parameters, and of which rows are held out.
    - `held_out`: the fraction of the rows that is not trained on.
    - `batch_size`: by default all rows up to 2000, and 256 of more.
    - `task`: `"classification"` or `"regression"`; by default the former for text and for integers that repeat.
    - `ignore`: columns or arrays that are no inputs.
    """
    path = Path(path)
    check_options(hidden, held_out, task)
    source = reader(path)(path, target, ignore)
    check_rows(source, path)
    parts = parted(len(source.target), held_out, seed)
    inputs = source.inputs if source.is_scaled else units(source.inputs[parts.training]).standardised(source.inputs)
    aim = decided(source, parts, task)
    data, other = ((jnp.asarray(inputs[rows], float), jnp.asarray(aim.target[rows])) for rows in parts)
    model, params = perceptron((inputs.shape[1], *hidden, aim.num_outputs), seed)
    whole = BATCH if len(parts.training) > WHOLE_BATCH else None
    return Problem(
        model,
        aim.objective,
        params,
        data,
        batch_size=whole if batch_size is None else batch_size,
        held_out=other if len(parts.held_out) else None,
        metrics=aim.metrics,
        steps=500,
        name=path.name,
        about=description(source, parts, aim),
    )


def check_options(hidden: tuple[int, ...], held_out: float, task: Any) -> None:
    if any(size < 1 for size in hidden):
        raise ValueError(f"Hidden layers need at least one unit each, but `hidden` is {hidden}.")
    if not 0 <= held_out <= 0.9:
        raise ValueError(f"`held_out` is a fraction of the rows, from 0 to 0.9, but got {held_out}.")
    if task not in (None, *TASKS):
        raise ValueError(f"`task` is {quoted(TASKS)}, or left out to be decided by the target, but got `{task}`.")


def reader(path: Path) -> Callable[[Path, str | None, Sequence[str]], Table]:
    """How to read a file that exists, by the end of its name."""
    if path.is_dir():
        raise ValueError(f"`{path}` is a folder. Name a file in it.")
    if not path.is_file():
        near = sorted(each.name for each in path.parent.iterdir()) if path.parent.is_dir() else []
        where = "" if path.parent.is_dir() else f" There is no folder `{path.parent}` either."
        raise FileNotFoundError(f"There is no file `{path}`.{close(path.name, near)}{where}")
    for ending, read in READERS.items():
        if re.search(f"{ending}$", path.name, re.IGNORECASE):
            return read
    raise ValueError(
        f"`{path}` ends in none of `.csv`, `.csv.gz`, `.npz` and `-idx3-ubyte` (also with `.gz`), so it is not known "
        "how to read it. Convert it to one of these, or write a problem of your own with `ng.Problem`."
    )


def check_rows(source: Table, path: Path) -> None:
    rows, columns = source.inputs.shape
    if rows < MIN_ROWS:
        raise ValueError(f"`{path}` has {rows} rows of data, but at least {MIN_ROWS} are needed to train and to judge.")
    if columns == 0:
        raise ValueError(f"`{path}` has no inputs besides the target `{source.target_name}` and what is ignored.")


def decided(source: Table, parts: Split, task: str | None) -> Aim:
    is_classification = looks_like_labels(source.target) if task is None else task == "classification"
    return classification(source) if is_classification else regression(source, parts)


def looks_like_labels(target: np.ndarray) -> bool:
    """Text, or integers that are few next to the rows."""
    if target.dtype.kind in "US":
        return True
    is_integer = target.dtype.kind in "biu"
    count = len(np.unique(target))
    few = count <= (MAX_LABELS if is_integer else MAX_CLASSES) and count < len(target) / 10
    return few and (is_integer or bool(np.all(target == np.round(target))))


def classification(source: Table) -> Aim:
    classes, numbers = np.unique(source.target, return_inverse=True)
    if len(classes) < 2:
        raise ValueError(
            f"The target `{source.target_name}` is `{classes[0]}` in all rows: there is only one class, and nothing to "
            "learn. Choose another target."
        )
    about = f"classification of `{source.target_name}`, {len(classes)} classes"
    return Aim(numbers.astype(np.int32), ng.Categorical(), len(classes), None, about)


def regression(source: Table, parts: Split) -> Aim:
    if source.target.dtype.kind in "US":
        raise ValueError(
            f"The target `{source.target_name}` has text, such as `{source.target[0]}`, so that regression is not "
            'possible. Leave `task` out, or give `task="classification"`.'
        )
    values = source.target.astype(np.float64)[:, None]
    training = values[parts.training]
    if np.ptp(training) == 0:
        raise ValueError(
            f"The target `{source.target_name}` is {training[0, 0]:g} in all rows that are trained on: it is constant, "
            "and there is nothing to learn. Choose another target."
        )
    of_target = units(training)
    deviation = float(of_target.deviation[0])
    metrics = {
        "explained variance": explained_variance,
        "root mean squared error": lambda z, y: deviation * jnp.sqrt(jnp.mean((z - y) ** 2)),
    }
    about = f"regression of `{source.target_name}`, whose unit is its deviation of {deviation:.4g}"
    target = of_target.standardised(values).astype(jnp.zeros(()).dtype)
    return Aim(target, ng.LeastSquares(), 1, metrics, about)


def description(source: Table, parts: Split, aim: Aim) -> str:
    rows, columns = source.inputs.shape
    scale = "scaled to [0, 1]" if source.is_scaled else "standardised by the rows that are trained on"
    unused = f" Not used, for their lengths: {quoted(source.left_out)}." if source.left_out else ""
    return (
        f"{rows} rows with {columns} inputs, {scale}; {aim.about}; {len(parts.training)} rows to train on and "
        f"{len(parts.held_out)} held out.{unused}"
    )
