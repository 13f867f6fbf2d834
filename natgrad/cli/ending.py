"""The end of a command: its report in files and, in short, on the terminal."""

import textwrap
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from natgrad import _text
from natgrad.cli.failure import INTERRUPTED
from natgrad.report import write_report


def finish(report: dict[str, Any], out: Path, *, as_json: bool, quiet: bool) -> None:
    """Write the report, print it, and leave with the exit code of an interruption if there was one."""
    paths = write_report(report, out)
    if as_json:
        print((out / "report.json").read_text())
    elif not quiet:
        print_report(report, paths)
    if report["status"] == "interrupted":
        raise typer.Exit(INTERRUPTED)


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
    metric = next(iter(report["problem"]["metrics"]), "metric")
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
