"""Read inputs and a target from CSV, NPZ and IDX files, with an error message for every defect of a file."""

import collections
import csv
import difflib
import gzip
import io
import math
import re
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FILL_IN = "Fill them in, or remove their rows."


class Table(NamedTuple):
    """The content of a file: inputs of shape (rows, columns), and as target one number or one text a row.

    `is_scaled`: the inputs are in [0, 1] already. `left_out`: names of arrays in the file that are not used."""

    inputs: np.ndarray
    target: np.ndarray
    target_name: str
    is_scaled: bool = False
    left_out: tuple[str, ...] = ()


def quoted(names: Sequence[str], most: int = 30) -> str:
    """Names for a message, cut after `most`."""
    shown = ", ".join(f"`{name}`" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def did_you_mean(name: str, names: Sequence[str]) -> str:
    """A question that suggests the most similar of the names, or nothing if none is similar."""
    # Names that differ in case only are the most similar of all.
    lower = {candidate.lower(): candidate for candidate in names}
    matches = difflib.get_close_matches(name.lower(), lower, n=3)
    return f" Did you mean {' or '.join(f'`{lower[match]}`' for match in matches)}?" if matches else ""


def check_name(target: Any, names: Sequence[str], path: Path) -> str:
    """The name of the target, which must be one of the names in the file."""
    if target is None:
        raise ValueError(
            f"`{path}` has {quoted(names)}, but no target was given. Choose the one to predict with `target=`."
        )
    check_names([target], names, path)
    return target


def check_names(requested: Sequence[Any], names: Sequence[str], path: Path) -> None:
    """Refuse requested names that are not in the file."""
    for name in requested:
        if name not in names:
            available = f"Its names are {quoted(names)}." if names else "Its columns have no names."
            raise ValueError(f"`{path}` has nothing named `{name}`.{did_you_mean(str(name), names)} {available}")


def finite(values: np.ndarray, label: str, numbers: Sequence[int], remedy: str) -> np.ndarray:
    """The values, if all are finite; else an error that names the first bad row by its number in `numbers`."""
    for defect, is_bad in (("empty or NaN", np.isnan(values)), ("infinite", np.isinf(values))):
        if is_bad.any():
            first = numbers[int(np.argwhere(is_bad)[0, 0])]
            raise ValueError(f"{label} has {int(is_bad.sum())} {defect} cells, the first in row {first}. {remedy}")
    return values


def leave_out(name: str) -> str:
    """The remedy for bad cells in an input."""
    return f"Fill them in, remove their rows, or leave it out with `--ignore {name}`."


# Data types of the IDX format by their code in the third byte.
IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def file_bytes(path: Path) -> bytes:
    """The bytes of a file, decompressed if its name ends in `.gz`."""
    raw = path.read_bytes()
    if path.suffix != ".gz":
        return raw
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"`{path}` ends in `.gz`, but cannot be decompressed ({error}). Download it again, or rename it if it is "
            "not compressed."
        ) from error


def idx_array(raw: bytes, name: str) -> np.ndarray:
    """The array in an IDX file: two zero bytes, a type, the number of axes, their lengths, the entries."""
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in IDX_TYPES:
        raise ValueError(
            f"`{name}` does not begin like an IDX file: its first bytes are `{raw[:4].hex(' ')}` instead of `00 00`, "
            "a type and the number of axes. If it is compressed, give it a name that ends in `.gz`."
        )
    dtype, axes = np.dtype(IDX_TYPES[raw[2]]), raw[3]
    shape = tuple(int.from_bytes(raw[4 + 4 * k : 8 + 4 * k], "big") for k in range(axes))
    start, size = 4 + 4 * axes, math.prod(shape) * dtype.itemsize
    if len(raw) < start + size:
        raise ValueError(
            f"`{name}` is truncated: an array of shape {shape} takes {start + size} bytes, but the file has only "
            f"{len(raw)}. Download it again."
        )
    return np.frombuffer(raw, dtype, math.prod(shape), start).reshape(shape)


def read_idx(path: Path, target: str | None, ignore: Sequence[str]) -> Table:
    """Images of one file, scaled to [0, 1] if they are bytes, and the labels of another."""
    check_names(ignore, (), path)
    labels_path = label_file(path, target)
    images, labels = (idx_array(file_bytes(file), str(file)) for file in (path, labels_path))
    if labels.ndim != 1 or images.ndim < 2 or len(images) != len(labels):
        raise ValueError(
            f"`{path}` has shape {images.shape} and `{labels_path}` has shape {labels.shape}, but images need one axis "
            "more than their labels and the same length. Check that the files belong together."
        )
    is_scaled = images.dtype == np.uint8
    inputs = images.reshape(len(images), -1) / np.float32(255 if is_scaled else 1)
    return Table(inputs, labels, labels_path.name, is_scaled=is_scaled)


def label_file(path: Path, target: str | None) -> Path:
    """The file of labels, in the current folder or next to the images."""
    neighbours = sorted(file.name for file in path.parent.iterdir() if "idx1-ubyte" in file.name)
    available = f" Next to it: {quoted(neighbours)}." if neighbours else ""
    if target is None:
        raise ValueError(f"`{path}` holds only images: give the file of their labels as the target.{available}")
    for candidate in (Path(target), path.parent / target):
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(
        f"There is no file of labels `{target}`, neither in the current folder nor next to `{path}`.{available}"
    )


def read_npz(path: Path, target: str | None, ignore: Sequence[str]) -> Table:
    """The array `target`, and as inputs all other arrays of its length."""
    if not zipfile.is_zipfile(path):
        raise ValueError(f"`{path}` is not an archive of arrays. Write it with `np.savez(path, x=..., y=...)`.")
    with np.load(path, allow_pickle=False) as archive:
        target = check_name(target, archive.files, path)
        check_names(ignore, archive.files, path)
        arrays = {
            name: load_array(archive, name, path) for name in archive.files if name not in ignore or name == target
        }
    y = arrays.pop(target)
    if y.ndim == 0 or y.size != len(y):
        raise ValueError(
            f"The target `{target}` of `{path}` has shape {y.shape}, but one number for every row is needed. Save each "
            "of its columns as a separate array."
        )
    shapes = {name: array.shape for name, array in arrays.items()}
    inputs = {name: array for name, array in arrays.items() if array.shape[:1] == y.shape[:1]}
    if shapes and not inputs:
        raise ValueError(
            f"The target `{target}` of `{path}` has {len(y)} rows, but no other array has as many: {shapes}. Put the "
            "rows along the first axis."
        )
    columns = [numeric(array, name, path, leave_out(name)) for name, array in inputs.items()]
    y = y.reshape(-1) if y.dtype.kind in "US" else numeric(y, target, path, FILL_IN)[:, 0].astype(y.dtype)
    x = np.concatenate(columns, axis=1) if columns else np.zeros((len(y), 0))
    return Table(x, y, target, left_out=tuple(sorted(shapes.keys() - inputs.keys())))


def load_array(archive, name: str, path: Path) -> np.ndarray:
    """An array of an archive, unless it holds Python objects."""
    try:
        return archive[name]
    except ValueError as error:
        raise ValueError(
            f"Array `{name}` of `{path}` cannot be read ({error}). Arrays of Python objects are not loaded, because "
            "they can run code. Save numbers, or leave it out with `--ignore`."
        ) from error


def numeric(array: np.ndarray, name: str, path: Path, remedy: str) -> np.ndarray:
    """An array as rows and columns of finite numbers."""
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"Array `{name}` of `{path}` is of type `{array.dtype}`, but real numbers are needed. Convert it, or leave "
            "it out with `--ignore`."
        )
    rows = array.reshape(len(array), -1).astype(np.float64)
    return finite(rows, f"Array `{name}` of `{path}`", range(len(rows)), remedy)


# In this order where the header has one column only, and nothing splits it.
DELIMITERS = ",;\t"
MISSING = {"", "na", "n/a", "nan", "null", "none"}


class Cells(NamedTuple):
    """Columns of text by name, and the number of each row in the file, where the header is row 1."""

    columns: dict[str, Sequence[str]]
    numbers: Sequence[int]


def read_csv(path: Path, target: str | None, ignore: Sequence[str]) -> Table:
    """The column `target`, as text if most of its cells are text, and as inputs all other columns."""
    cells = read_cells(path)
    target = check_name(target, list(cells.columns), path)
    check_names(ignore, list(cells.columns), path)
    names = [name for name in cells.columns if name != target and name not in ignore]
    inputs = [numbers(cells, name, path, leave_out(name)) for name in names]
    y = labels(cells, target, path) if is_text(cells.columns[target]) else numbers(cells, target, path, FILL_IN)
    return Table(np.stack(inputs, axis=1) if inputs else np.zeros((len(y), 0)), y, target)


def read_cells(path: Path) -> Cells:
    """The cells of a CSV file, after checks of the header and of the length of every row."""
    text = read_text(path)
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter(text), strict=True))
    except csv.Error as error:
        raise ValueError(f"`{path}` cannot be read as a table ({error}). Check its quotation marks.") from error
    # Numbered before blank rows are dropped, so that messages count as an editor does.
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
    # A file without rows has columns all the same; `check_rows` says what is missing.
    columns = zip(*(row for _, row in body), strict=True) if body else [()] * len(names)
    return Cells(dict(zip(names, columns, strict=True)), [number for number, _ in body])


def read_text(path: Path) -> str:
    """The text of a file in UTF-8, without the byte order mark that spreadsheets write."""
    try:
        return file_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"`{path}` is not text in UTF-8 ({error}). Save it as CSV in UTF-8.") from error


def delimiter(text: str) -> str:
    """The delimiter that splits the header into most cells."""
    header = re.split(r"[\r\n]", text.lstrip("\r\n"), maxsplit=1)[0]
    return max(DELIMITERS, key=lambda character: len(next(csv.reader([header], delimiter=character), [])))


def check_header(names: Sequence[str], path: Path) -> None:
    """Refuse a header that is missing, incomplete or ambiguous."""
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
        alternative = "" if remedy == FILL_IN else f", or leave it out with `--ignore {name}`"
        raise ValueError(
            f"Column `{name}` of `{path}` has text where a number is needed: `{column[row]}` in row "
            f"{cells.numbers[row]}. Replace it by a number{alternative}."
        )
    return finite(np.array(values, float), f"Column `{name}` of `{path}`", cells.numbers, remedy)


def is_text(column: Sequence[str]) -> bool:
    """Whether most of the cells hold text. Single texts among numbers are reported as mistakes."""
    return 2 * sum(number(cell) is None for cell in column) > len(column)


def labels(cells: Cells, name: str, path: Path) -> np.ndarray:
    """A column as text, none of it missing."""
    values = [cell.strip() for cell in cells.columns[name]]
    missing = np.array([np.nan if value.lower() in MISSING else 0.0 for value in values])
    finite(missing, f"Column `{name}` of `{path}`", cells.numbers, FILL_IN)
    return np.array(values)


def number(cell: str) -> float | None:
    """The number in a cell, NaN if the cell is empty, `None` if it is text."""
    try:
        return float(cell)
    except ValueError:
        return float("nan") if cell.strip().lower() in MISSING else None
