"""The command line: `natgrad COMMAND`, with `--help` on each."""

import sys
from pathlib import Path
from typing import Annotated

try:
    import typer
except ImportError:
    sys.exit("The command line needs `typer` and `rich`. Install them with `pip install 'natgrad[cli,plots]'`.")

import natgrad
from natgrad.plots import FIGURES, save_figures

app = typer.Typer(
    help="Natural gradients for JAX: choose a geometry on the outputs, pull it back, step downhill in it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _print_version(wanted: bool) -> bool:
    if wanted:
        print(f"natgrad {natgrad.__version__}")
        raise typer.Exit()
    return wanted


@app.callback()
def natgrad_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


def _complete(incomplete: str) -> list[str]:
    return [name for name in FIGURES if name.startswith(incomplete)]


@app.command(epilog="Examples: `natgrad figures --out out`, `natgrad figures rosenbrock pullback`")
def figures(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]...", help="Which figures; all if none is named.", autocompletion=_complete),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder to write to, made if need be.")] = Path("figures"),
    list_names: Annotated[bool, typer.Option("--list", help="Print the names of all figures and exit.")] = False,
) -> None:
    """Draw the figures of the theory, from the library's own computations.

    Writes `NAME-light` and `NAME-dark`, each as SVG and PNG."""
    if list_names:
        print("\n".join(FIGURES))
        return
    try:
        paths = save_figures(names or [], out, progress=True)
    except ImportError as error:
        raise typer.BadParameter(f"{error}. Install it with `pip install 'natgrad[plots]'`.") from error
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    print(f"{len(paths)} files in {out}: {', '.join(sorted({path.stem.rsplit('-', 1)[0] for path in paths}))}")
