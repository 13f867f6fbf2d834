"""The end of a command: write its report to files, print a summary, and turn exceptions into messages."""

import functools
import inspect
import math
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

PARTIAL = {
    "interrupted": "The run was interrupted; results are partial.",
    "out of time": "Time limit reached; results are partial.",
}


def prepare(out: Path) -> None:
    """Check that a report can be written to a folder, before the work for it starts."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        # A folder may exist and still refuse files: no permission, a full or read-only disk.
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise Failure(
            f"The report cannot be written to `{out}` ({error}). Choose another folder with `--out`."
        ) from error


def finish(report: dict[str, Any], out: Path, *, as_json: bool, quiet: bool) -> None:
    """Write the report, print its summary, and exit with code 130 if the command was interrupted."""
    try:
        paths = write_report(report, out)
    except OSError as error:
        # The results of a long run are worth more on the screen than nowhere.
        print_report(report, [])
        raise Failure(f"The report could not be written to `{out}` ({error}).") from error
    if as_json:
        print((out / "report.json").read_text())
    elif not quiet:
        print_report(report, paths)
    if report["status"] == "interrupted":
        raise typer.Exit(INTERRUPTED)


def print_report(report: dict[str, Any], paths: list[Any]) -> None:
    """Print the verdict, a table of the methods, their notes, and the path of the report."""
    console = Console(highlight=False)
    width = min(console.width, 100)
    console.print(Text(textwrap.fill(report["verdict"], width), style="bold"), soft_wrap=True)
    if report["methods"]:
        console.print(_table(report), width=width)
    for method in report["methods"]:
        if method["note"]:
            console.print(textwrap.fill(f"{method['name']}: {method['note']}", width), markup=False, soft_wrap=True)
    if report["status"] in PARTIAL:
        console.print(PARTIAL[report["status"]])
    for path in paths[:1]:
        console.print(f"Report: {path}", markup=False, soft_wrap=True)


def _table(report: dict[str, Any]) -> Table:
    """The methods, one a row, without columns that are empty for all of them."""
    metric = next(iter(report["problem"]["metrics"]), "metric")
    rows = [_row(method, metric, report["status"]) for method in report["methods"]]
    titles = [title for title in rows[0] if any(row[title] not in ("–", "") for row in rows)]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("method", no_wrap=True)
    for title in titles:
        # As `Text`, since rich reads brackets in a string as markup.
        table.add_column(Text(title), justify="right" if title else "left", no_wrap=True)
    for method, row in zip(report["methods"], rows, strict=True):
        table.add_row(method["name"], *(row[title] for title in titles))
    return table


def _row(method: dict[str, Any], metric: str, status: str) -> dict[str, str]:
    """The cells of a method by the titles of their columns, in two lines so that all fit into 80 characters."""
    return {
        "learning\nrate": _cell(method["settings"].get("learning_rate"), "{:g}".format),
        "steps to\ntarget": _cell(method["steps_to_target"], "{:,}".format),
        "time to\ntarget": _cell(method["seconds_to_target"], _text.duration),
        "final\nloss": _cell(method["final_loss"], _text.number),
        "held-out\nloss": _cell(method["final_held_out_loss"], _text.number),
        metric.replace(" ", "\n"): _cell(method["final_metrics"].get(metric), _text.number),
        "": "" if method["status"] in ("complete", status) else method["status"],
    }


def _cell(value: Any, form: Callable[[Any], str]) -> str:
    return "–" if value is None or math.isnan(value) else form(value)


# 130 is what shells report for Ctrl-C: 128 plus the number of SIGINT.
FAILED, INTERRUPTED = 1, 130


class Failure(Exception):
    """A failure whose text is all that the user needs to know."""


def report_errors(command: Callable) -> Callable:
    """Decorate a command to print its exceptions as messages, and as tracebacks only with `--debug`."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        bound = inspect.signature(command).bind(*arguments, **options).arguments
        problem, debug = str(bound.get("problem", "")), bool(bound.get("debug"))
        try:
            return command(*arguments, **options)
        except KeyboardInterrupt:
            print("Interrupted.", file=sys.stderr)
            raise typer.Exit(INTERRUPTED) from None
        # Typer prints these itself.
        except (typer.BadParameter, typer.Exit, typer.Abort):
            raise
        except (Failure, CompilerError) as failure:
            _print_error(str(failure), debug)
        except (ValueError, TypeError, OSError, ImportError) as error:
            _print_error(error_text(error, problem), debug)
        except Exception as error:
            if _frame(error, problem) is None and not debug:
                print("This looks like a bug in natgrad. Run again with `--debug` for details.", file=sys.stderr)
            _print_error(error_text(error, problem), debug)
        raise typer.Exit(FAILED)

    return run


def error_text(error: Exception, problem: str) -> str:
    """The text of an error, with the line of the user's problem file if the error was raised from there."""
    is_plain = isinstance(error, ValueError | TypeError | TimeoutError)
    text = str(error) if is_plain else f"{type(error).__name__}: {error}"
    frame = _frame(error, problem)
    if frame is None:
        return text.strip()
    line = "" if not frame.line else f"\n    {frame.line.strip()}"
    return f"{Path(frame.filename).name}, line {frame.lineno}:{line}\n{type(error).__name__}: {error}"


def _frame(error: Exception, problem: str) -> traceback.FrameSummary | None:
    """The last frame of an error's traceback that is in the user's problem file."""
    path = os.path.abspath(problem.partition(".py")[0] + ".py")
    if isinstance(error, SyntaxError) and error.filename and path == os.path.abspath(error.filename):
        return traceback.FrameSummary(error.filename, error.lineno, "", line=error.text)
    # An error of the user's model may have been raised again by JAX or by natgrad, in other words.
    chain = [link for link in (error, error.__cause__, error.__context__) if link is not None]
    frames = [frame for link in chain for frame in traceback.extract_tb(link.__traceback__)]
    return next((frame for frame in reversed(frames) if os.path.abspath(frame.filename) == path), None)


def _print_error(text: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(f"Error: {text}", file=sys.stderr)
