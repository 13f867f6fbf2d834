"""Numbers, tables, warnings and progress bars as people read them."""

import inspect
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar


def size(count: int) -> str:
    """A number of bytes to three digits, in B, kB, MB or GB."""
    for factor, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"


def number(value: float) -> str:
    """A number to three digits; from 1,000 to a million as a whole number with commas."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """A duration in ms, s or min."""
    if seconds >= 90:
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A table with a ruled header, its columns aligned by spaces."""
    widths = [max(len(row[k]) for row in (header, *rows)) for k in range(len(header))]
    rule = tuple("-" * width for width in widths)
    lines = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in (header, rule, *rows)]
    return "\n".join("  ".join(line).rstrip() for line in lines)


def warn(message: str) -> None:
    """Warn at the line that called the library: the caller of its outermost frame."""
    package, frame, level, stacklevel = str(Path(__file__).parent), inspect.currentframe(), 1, 1
    while frame is not None:
        if frame.f_code.co_filename.startswith(package):
            stacklevel = level + 1
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=stacklevel)


Item = TypeVar("Item")


def track(items: Iterable[Item], description: str, *, show: bool) -> Iterable[Item]:
    """Iterate with a progress bar, if `show` is set, `rich` is installed and the output is a terminal."""
    if show:
        try:
            from rich.console import Console
            from rich.progress import track as rich_track
        except ImportError:
            return items
        if Console().is_terminal:
            return rich_track(items, description=description, transient=True)
    return items
