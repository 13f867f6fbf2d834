"""`natgrad figures`: the figures of the documentation."""

from pathlib import Path
from typing import Annotated

import typer

from natgrad.cli import options
from natgrad.cli.ending import Failure, report_errors
from natgrad.plots import FIGURES, save_figures

EXAMPLES = "Examples: `natgrad figures --out out`, `natgrad figures rosenbrock pullback`"


def complete(incomplete: str) -> list[str]:
    return [name for name in FIGURES if name.startswith(incomplete)]


@report_errors
def figures(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Figures to draw. Default: all.", autocompletion=complete),
    ] = None,
    out: options.Out = Path("figures"),
    list_names: Annotated[bool, typer.Option("--list", help="Print the names of all figures and exit.")] = False,
    debug: options.Debug = False,
) -> None:
    """Draw the figures of the documentation, computed by natgrad.

    Writes `NAME-light` and `NAME-dark`, each as SVG and PNG."""
    del debug
    if list_names:
        print("\n".join(FIGURES))
        return
    try:
        paths = save_figures(names or [], out, progress=True)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except ImportError as error:
        raise Failure(f"{error}. Install it with `pip install 'natgrad[plots]'`.") from error
    print(f"{len(paths)} files in {out}: {', '.join(sorted({path.stem.rsplit('-', 1)[0] for path in paths}))}")
