"""Inputs and a target as they are read from a file, and what every kind of file must hold."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

FILL_IN = "Fill them in, or remove their rows."


class Source(NamedTuple):
    """What a file holds: inputs, rows by columns, and one number or one text a row as the target.

    `is_scaled` says that the inputs are in [0, 1] already, `left_out` what in the file was not used."""

    inputs: np.ndarray
    target: np.ndarray
    target_name: str
    is_scaled: bool = False
    left_out: tuple[str, ...] = ()


def quoted(names: Sequence[str], most: int = 30) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def close(name: str, names: Sequence[str]) -> str:
    """A question for the likeliest of the names that may have been meant, if there are any."""
    lower = {each.lower(): each for each in names}
    matches = difflib.get_close_matches(name.lower(), lower, n=3)
    return f" Did you mean {' or '.join(f'`{lower[match]}`' for match in matches)}?" if matches else ""


def check_name(target: Any, names: Sequence[str], path: Path) -> str:
    """The name of the target, which must be one of those in the file."""
    if target is None:
        raise ValueError(f"`{path}` has {quoted(names)}, but no target was given. Say which of them to predict.")
    check_names([target], names, path)
    return target


def check_names(asked: Sequence[Any], names: Sequence[str], path: Path) -> None:
    for name in asked:
        if name not in names:
            there = f"Its names are {quoted(names)}." if names else "Its columns have no names."
            raise ValueError(f"`{path}` has nothing named `{name}`.{close(str(name), names)} {there}")


def finite(values: np.ndarray, label: str, numbers: Sequence[int], remedy: str) -> np.ndarray:
    """The values, all of which must be finite; rows are called by their `numbers`."""
    for what, is_wrong in (("empty or NaN", np.isnan(values)), ("infinite", np.isinf(values))):
        if is_wrong.any():
            first = numbers[int(np.argwhere(is_wrong)[0, 0])]
            raise ValueError(f"{label} has {int(is_wrong.sum())} {what} cells, the first in row {first}. {remedy}")
    return values


def leave_out(name: str) -> str:
    return f"Fill them in, remove their rows, or leave it out with `--ignore {name}`."
