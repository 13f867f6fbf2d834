"""Progress bars, where the optional `rich` is installed and the output is a terminal."""

from collections.abc import Iterable
from typing import TypeVar

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
