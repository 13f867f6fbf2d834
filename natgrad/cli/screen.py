"""What a person sees in the terminal: bars while it runs, and what came of it."""

import textwrap
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

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


def print_report(report: dict[str, Any], paths: list[Any]) -> None:
    """The verdict, a compact table, and where the report is."""
    console = Console(highlight=False)
    width = min(console.width, 100)
    console.print(Text(textwrap.fill(report["verdict"], width), style="bold"), soft_wrap=True)
    if report["methods"]:
        console.print(_table(report), width=width)
    for each in report["methods"]:
        if each["note"]:
            console.print(textwrap.fill(f"{each['name']}: {each['note']}", width), markup=False, soft_wrap=True)
    if report["status"] != "complete":
        console.print(f"This is what there was when it was {report['status']}.".replace("was out", "ran out"))
    for path in paths[:1]:
        console.print(f"Report: {path}", markup=False, soft_wrap=True)


def _table(report: dict[str, Any]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    metric = next(iter(report["problem"]["metrics"]), None)
    table.add_column("method", no_wrap=True)
    columns: dict[str, Any] = {
        "rate": lambda each: _cell(each["settings"].get("learning_rate"), "{:g}".format),
        "steps to": lambda each: _cell(each["steps_to_target"], "{:,}".format),
        "time to": lambda each: _cell(each["seconds_to_target"], _text.duration),
        "loss": lambda each: _cell(each["final_loss"], _text.number),
        "held out": lambda each: _cell(each["final_held_out_loss"], _text.number),
        metric: lambda each: _cell(each["final_metrics"].get(metric), _text.number),
        "": lambda each: "" if each["status"] == "complete" else each["status"],
    }
    rows = {each["name"]: {title: cell(each) for title, cell in columns.items()} for each in report["methods"]}
    shown = [title for title in columns if any(row[title] not in ("–", "") for row in rows.values())]
    for title in shown:
        table.add_column(title, justify="right" if title else "left", no_wrap=True)
    for name, row in rows.items():
        table.add_row(name, *(row[title] for title in shown))
    return table


def _cell(value: Any, form: Any) -> str:
    return "–" if value is None or value != value else form(value)


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
