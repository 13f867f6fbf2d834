from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from natgrad.cli import options
from natgrad.cli.ending import Failure, reported

EXAMPLES = "Examples: `natgrad new`, `natgrad new models/mine.py`, then `natgrad compare models/mine.py:problem`"


@reported
def new(
    path: Annotated[Path, typer.Argument(metavar="[FILE]", help="The file to write.")] = Path("problem.py"),
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is there.")] = False,
    debug: options.Debug = False,
) -> None:
    """Write a problem file to start from."""
    del debug
    if path.suffix != ".py":
        raise typer.BadParameter(f"`{path}` is no Python file. Give a name that ends in `.py`.")
    if path.exists() and not force:
        raise Failure(f"`{path}` is there already. Choose another name, or replace it by `--force`.")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(resources.files("natgrad.cli").joinpath("template.py").read_text())
    print(f"Wrote {path}. Try it: natgrad compare {path}:problem")
