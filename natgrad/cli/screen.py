"""What a person sees in the terminal while it runs."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from natgrad import _text
from natgrad.comparison.compare import Progress as Advance


class Screen:
    """Bars on the error stream, as long as that is a terminal: one for everything, with the time left, and one for
    every method. They leave nothing behind."""

    def __init__(self, *, show: bool):
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description:<24.24}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[note]:<30.30}", markup=False),
        )
        is_shown = show and console.is_terminal
        self._bars = Progress(*columns, console=console, transient=True, disable=not is_shown, refresh_per_second=5)
        self._rows: dict[str, TaskID] = {}
        self._start = time.perf_counter()
        self._stage = ("", self._start)

    def __enter__(self) -> "Screen":
        self._bars.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bars.stop()

    def watch(self, advance: Advance) -> None:
        if advance.stage != self._stage[0]:
            self._stage = (advance.stage, time.perf_counter())
        self._show("", advance.stage, advance.done, self._clock(advance))
        if advance.outcome is not None:
            name = advance.outcome.method.name
            run = advance.outcome.best
            note = "" if run is None else f"{run.steps:,} steps, loss {_text.number(run.curve[-1].loss)}"
            self._show(name, f"  {name}", advance.done, note)

    def _clock(self, advance: Advance) -> str:
        now = time.perf_counter()
        passed = _minutes(now - self._start)
        if not advance.done:
            return passed
        left = (now - self._stage[1]) * (1 - advance.done) / advance.done
        return f"{passed}, about {_minutes(left)} left"

    def _show(self, key: str, description: str, done: float, note: str) -> None:
        if key not in self._rows:
            self._rows[key] = self._bars.add_task(description, total=1.0, note=note)
        self._bars.update(self._rows[key], completed=done, description=description, note=note)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
