"""The end of a command: its report in files and, in short, on the terminal."""

import functools
import inspect
import os
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from natgrad import _text
from natgrad._backend import CompilerError
from natgrad.report import write_report


def prepare(out: Path) -> None:
    """Make sure that a report can be written, before there is one."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise Failure(
            f"The report cannot be written to `{out}` ({error}). Choose another folder by `--out`."
        ) from error


def finish(report: dict[str, Any], out: Path, *, as_json: bool, quiet: bool) -> None:
    """Write the report, print it, and leave with the exit code of an interruption if there was one."""
    try:
        paths = write_report(report, out)
    except OSError as error:
        print_report(report, [])
        raise Failure(f"The report could not be written to `{out}` ({error}).") from error
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
    """The methods, one a row, without columns that have nothing to say."""
    metric = next(iter(report["problem"]["metrics"]), "metric")
    columns: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("rate", lambda each: _cell(each["settings"].get("learning_rate"), "{:g}".format)),
        ("steps to", lambda each: _cell(each["steps_to_target"], "{:,}".format)),
        ("time to", lambda each: _cell(each["seconds_to_target"], _text.duration)),
        ("loss", lambda each: _cell(each["final_loss"], _text.number)),
        ("held out", lambda each: _cell(each["final_held_out_loss"], _text.number)),
        (metric, lambda each: _cell(each["final_metrics"].get(metric), _text.number)),
        ("", lambda each: "" if each["status"] in ("complete", report["status"]) else each["status"]),
    ]
    methods = report["methods"]
    shown = [(title, cell) for title, cell in columns if any(cell(each) not in ("–", "") for each in methods)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("method", no_wrap=True)
    for title, _ in shown:
        # As text, in which brackets mean nothing.
        table.add_column(Text(title), justify="right" if title else "left", no_wrap=True)
    for each in methods:
        table.add_row(each["name"], *(cell(each) for _, cell in shown))
    return table


def _cell(value: Any, form: Any) -> str:
    return "–" if value is None or value != value else form(value)


FAILED, INTERRUPTED = 1, 130


class Failure(Exception):
    """Something went wrong for a reason that its text says."""


def reported(command: Callable) -> Callable:
    """A command whose exceptions are printed as text. `--debug` shows where they come from."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        given = inspect.signature(command).bind(*arguments, **options).arguments
        try:
            return command(*arguments, **options)
        except KeyboardInterrupt:
            print("Interrupted.", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        except (typer.BadParameter, typer.Exit, typer.Abort):
            raise
        except (Failure, CompilerError) as failure:
            _tell(str(failure), given)
        except (ValueError, TypeError, OSError, ImportError) as error:
            _tell(described(error, given.get("problem")), given)
        except Exception as error:
            if _frame(error, given.get("problem")) is None and not given.get("debug"):
                print("This looks like a bug in natgrad. Run again with `--debug` for details.", file=sys.stderr)
            _tell(described(error, given.get("problem")), given)
        raise typer.Exit(FAILED)

    return run


def described(error: Exception, problem: Any) -> str:
    """The text of an error; and if it came out of the user's file, the line there."""
    is_plain = isinstance(error, ValueError | TypeError | TimeoutError)
    text = str(error) if is_plain else f"{type(error).__name__}: {error}"
    frame = _frame(error, problem)
    if frame is None:
        return text.strip()
    line = "" if not frame.line else f"\n    {frame.line.strip()}"
    return f"{Path(frame.filename).name}, line {frame.lineno}:{line}\n{type(error).__name__}: {error}"


def _frame(error: Exception, problem: Any) -> traceback.FrameSummary | None:
    """The last line of the user's problem file on the way to an error."""
    path = str(problem or "").partition(".py")[0] + ".py"
    if isinstance(error, SyntaxError) and error.filename and os.path.abspath(path) == os.path.abspath(error.filename):
        return traceback.FrameSummary(error.filename, error.lineno, "", line=error.text)
    chain = [error, error.__cause__, error.__context__]
    frames = [frame for each in chain if each is not None for frame in traceback.extract_tb(each.__traceback__)]
    own = [frame for frame in frames if os.path.abspath(frame.filename) == os.path.abspath(path)]
    return own[-1] if own else None


def _tell(text: str, given: dict[str, Any]) -> None:
    if given.get("debug"):
        traceback.print_exc()
    print(f"Error: {text}", file=sys.stderr)
