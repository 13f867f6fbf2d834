"""Tables in text: rows of cells, and a header that names the columns."""

import collections
import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from natgrad.problems._arrays import file_bytes
from natgrad.problems._columns import FILL_IN, Source, check_name, check_names, finite, leave_out

DELIMITERS = ",;\t"
MISSING = {"", "na", "n/a", "nan", "null", "none"}


class Cells(NamedTuple):
    """Columns of text by their names, and the number of each row in the file, where the header is the first."""

    columns: dict[str, Sequence[str]]
    numbers: Sequence[int]


def read_csv(path: Path, target: str | None, ignore: Sequence[str]) -> Source:
    """The column named by `target`, as numbers if it has no text, and as inputs all others."""
    cells = read_cells(path)
    target = check_name(target, list(cells.columns), path)
    check_names(ignore, list(cells.columns), path)
    names = [name for name in cells.columns if name != target and name not in ignore]
    inputs = [numbers(cells, name, path, leave_out(name)) for name in names]
    y = labels(cells, target, path) if is_text(cells.columns[target]) else numbers(cells, target, path, FILL_IN)
    return Source(np.stack(inputs, axis=1) if inputs else np.zeros((len(y), 0)), y, target)


def read_cells(path: Path) -> Cells:
    text = decoded(path)
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter(text), strict=True))
    except csv.Error as error:
        raise ValueError(f"`{path}` cannot be read as a table ({error}). Check its quotation marks.") from error
    numbered = [(number, row) for number, row in enumerate(rows, 1) if any(map(str.strip, row))]
    if not numbered:
        raise ValueError(f"`{path}` is empty. Its first row must name the columns.")
    (_, header), *body = numbered
    names = [name.strip() for name in header]
    check_header(names, path)
    for number, row in body:
        if len(row) != len(names):
            raise ValueError(
                f"Row {number} of `{path}` has {len(row)} cells, but the header has {len(names)}. Put cells that hold "
                "the delimiter into quotation marks."
            )
    columns = zip(*(row for _, row in body), strict=True) if body else [()] * len(names)
    return Cells(dict(zip(names, columns, strict=True)), [number for number, _ in body])


def decoded(path: Path) -> str:
    try:
        return file_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"`{path}` is not text in UTF-8 ({error}). Save it as CSV in UTF-8.") from error


def delimiter(text: str) -> str:
    """What splits the header into most cells."""
    header = re.split(r"[\r\n]", text.lstrip("\r\n"), maxsplit=1)[0]
    return max(DELIMITERS, key=lambda each: len(next(csv.reader([header], delimiter=each), [])))


def check_header(names: Sequence[str], path: Path) -> None:
    if None not in map(number, names) and any(names):
        raise ValueError(
            f"The first row of `{path}` has only numbers, `{', '.join(names[:5])}`, but it must name the columns. Add "
            "a header."
        )
    if "" in names:
        raise ValueError(
            f"Column {names.index('') + 1} of `{path}` has no name. Name it in the header, or remove it: if it is the "
            "index of a data frame, save that with `index=False`."
        )
    if repeated := [name for name, count in collections.Counter(names).items() if count > 1]:
        raise ValueError(f"The header of `{path}` has `{repeated[0]}` more than once. Give each column its own name.")


def numbers(cells: Cells, name: str, path: Path, remedy: str) -> np.ndarray:
    """A column as finite numbers."""
    column = cells.columns[name]
    values = [number(cell) for cell in column]
    if None in values:
        row = values.index(None)
        otherwise = "" if remedy == FILL_IN else f", or leave it out with `--ignore {name}`"
        raise ValueError(
            f"Column `{name}` of `{path}` has text where a number is needed: `{column[row]}` in row "
            f"{cells.numbers[row]}. Write it in numbers{otherwise}."
        )
    return finite(np.array(values, float), f"Column `{name}` of `{path}`", cells.numbers, remedy)


def is_text(column: Sequence[str]) -> bool:
    """Whether most of the cells hold text. A few among numbers are mistakes."""
    return 2 * sum(number(cell) is None for cell in column) > len(column)


def labels(cells: Cells, name: str, path: Path) -> np.ndarray:
    """A column as text."""
    values = [cell.strip() for cell in cells.columns[name]]
    missing = np.array([np.nan if value.lower() in MISSING else 0.0 for value in values])
    finite(missing, f"Column `{name}` of `{path}`", cells.numbers, FILL_IN)
    return np.array(values)


def number(cell: str) -> float | None:
    """The number in a cell, NaN if nothing is in it, `None` if it is text."""
    try:
        return float(cell)
    except ValueError:
        return float("nan") if cell.strip().lower() in MISSING else None
