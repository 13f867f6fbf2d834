"""Progress bars in the terminal while a command runs."""

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from natgrad import _text
from natgrad.experiment.compare import Progress as Advance


class Clock:
    """Elapsed time and an estimate of the time left in the stage, formatted anew at every refresh of the screen."""

    def __init__(self):
        self.start = time.perf_counter()
        self.stage, self.since, self.end = "", self.start, self.start

    def watch(self, advance: Advance) -> None:
        """Estimate the end of the stage from its progress."""
        now = time.perf_counter()
        if advance.stage != self.stage:
            self.stage, self.since = advance.stage, now
        # From this stage alone: compiling and training take very different times.
        self.end = now + (now - self.since) * (1 - advance.done) / advance.done if advance.done else now

    def __format__(self, form: str) -> str:
        now = time.perf_counter()
        left = f", about {_minutes(self.end - now)} left" if self.end > now else ""
        return format(_minutes(now - self.start) + left, form)


class Screen:
    """Progress bars on the error stream, if that is a terminal: one for the stage, with the time left, and one for each
    method. They are erased at the end."""

    def __init__(self, *, show: bool):
        # So that the results on the output stream can be piped to a file.
        console = Console(stderr=True)
        columns = (
            TextColumn("{task.description:<24.24}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[note]:<30.30}", markup=False),
        )
        is_shown = show and console.is_terminal
        self._bars = Progress(*columns, console=console, transient=True, disable=not is_shown, refresh_per_second=5)
        self._rows: dict[str, TaskID] = {}
        self._clock = Clock()

    def __enter__(self) -> "Screen":
        self._bars.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bars.stop()

    def watch(self, advance: Advance) -> None:
        """Show the progress of the stage, and the loss of the method at work."""
        self._clock.watch(advance)
        self._show("", advance.stage, advance.done, self._clock)
        if advance.outcome is not None and advance.outcome.best is not None:
            name, run = advance.outcome.method.name, advance.outcome.best
            note = f"{run.steps:,} steps, loss {_text.number(run.curve[-1].loss)}"
            self._show(name, f"  {name}", advance.done, note)

    def _show(self, key: str, description: str, done: float, note: Any) -> None:
        if key not in self._rows:
            self._rows[key] = self._bars.add_task(description, note=note)
        # Without a total, rich moves the bar to and fro.
        total = 1.0 if done else None
        self._bars.update(self._rows[key], completed=done, total=total, description=description, note=note)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
