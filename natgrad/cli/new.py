"""`natgrad new`: a problem file to start from."""

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from natgrad.cli import options
from natgrad.cli.ending import Failure, report_errors

EXAMPLES = "Examples: `natgrad new`, `natgrad new models/mine.py`, then `natgrad compare models/mine.py:problem`"


@report_errors
def new(
    path: Annotated[Path, typer.Argument(metavar="[FILE]", help="File to write.")] = Path("problem.py"),
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    debug: options.Debug = False,
) -> None:
    """Write a problem file to start from."""
    del debug
    if path.suffix != ".py":
        raise typer.BadParameter(f"`{path}` is not a Python file. Give a name that ends in `.py`.")
    if path.exists() and not force:
        raise Failure(f"`{path}` exists already. Choose another name, or overwrite it with `--force`.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(resources.files("natgrad.cli").joinpath("template.py").read_text())
    print(f"Wrote {path}. Try it: natgrad compare {path}:problem")
