"""Mistakes in words: no traceback unless asked for, and the user's own line where that is at fault."""

import functools
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from natgrad._backend import CompilerError

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
