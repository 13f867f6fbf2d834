"""The command line: `natgrad COMMAND`, with `--help` on each."""

import os
import sys
import threading
from typing import Annotated, Any

try:
    import plotly as _plotly  # noqa: F401
    import rich as _rich  # noqa: F401
    import typer
except ImportError as error:
    sys.exit(f"The command line needs `{error.name}`. Install it with `pip install 'natgrad[cli]'`.")

import natgrad
from natgrad.cli import compare, doctor, figures, inspect, new, train
from natgrad.experiment.run import COMPILATION

app = typer.Typer(
    help="Second-order optimisers (K-FAC, EKFAC, exact natural gradient) and curvature tools for any JAX model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["--help", "-h"]},
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


def main() -> None:
    """Run the command line and exit with its code."""
    code: Any = 0
    try:
        app()
    except SystemExit as end:
        code = end.code
    if any(thread.name == COMPILATION for thread in threading.enumerate()):
        # XLA is still compiling in a thread that was given up. Python would finalise under it and abort the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
    sys.exit(code)


app.command(epilog=compare.EXAMPLES)(compare.compare)
app.command(epilog=train.EXAMPLES)(train.train)
app.command(epilog=inspect.EXAMPLES)(inspect.inspect)
app.command(epilog=new.EXAMPLES)(new.new)
app.command(epilog=doctor.EXAMPLES)(doctor.doctor)
app.command(epilog=figures.EXAMPLES)(figures.figures)
