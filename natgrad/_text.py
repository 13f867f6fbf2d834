"""Numbers, tables and warnings for people to read."""

import inspect
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar


def size(count: int) -> str:
    """A number of bytes."""
    for factor, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count} B"


def number(value: float) -> str:
    """To three digits."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def duration(seconds: float) -> str:
    if seconds >= 90:
        return f"{int(seconds) // 60}:{int(seconds) % 60:02d} min"
    return f"{seconds:.2g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[k]) for row in (header, *rows)) for k in range(len(header))]
    line = lambda row: "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    return "\n".join([line(header), line(tuple("-" * width for width in widths)), *map(line, rows)])


def warn(message: str) -> None:
    """Warn at the line that called the library: that beyond its outermost frame."""
    package, frame, level, found = str(Path(__file__).parent), inspect.currentframe(), 1, 1
    while frame is not None:
        found = level + 1 if frame.f_code.co_filename.startswith(package) else found
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=found)


Item = TypeVar("Item")


def track(items: Iterable[Item], description: str, *, show: bool) -> Iterable[Item]:
    """The items, with a progress bar that leaves nothing behind."""
    if show:
        try:
            from rich.console import Console
            from rich.progress import track as rich_track
        except ImportError:
            return items
        if Console().is_terminal:
            return rich_track(items, description=description, transient=True)
    return items
