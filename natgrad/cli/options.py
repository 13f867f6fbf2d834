"""Options that several commands share, with their help texts."""

from pathlib import Path
from typing import Annotated

import typer

from natgrad.problems import PROBLEMS


def complete_problem(incomplete: str) -> list[tuple[str, str]]:
    """The ready-made problems that start with `incomplete`, for the completion of the shell."""
    return [(name, problem.about) for name, problem in PROBLEMS.items() if name.startswith(incomplete)]


ProblemName = Annotated[
    str,
    typer.Argument(
        metavar="[PROBLEM]",
        help=f"One of {', '.join(PROBLEMS)}; or `file.py:name`, a function that returns an `ng.Problem`; or a data "
        "file (CSV, NPZ or IDX; needs `--target`).",
        autocompletion=complete_problem,
    ),
]
Steps = Annotated[
    int | None, typer.Option(min=1, help="Number of steps of each run. Default: the `steps` of the problem.")
]
Seconds = Annotated[
    float | None,
    typer.Option(min=1.0, help="Time limit in seconds for the whole command, compilation included. Default: none."),
]
Seed = Annotated[int, typer.Option(min=0, help="Random seed for initial parameters, batches and samples.")]
Out = Annotated[Path, typer.Option(help="Output folder; created if it does not exist.")]
Json = Annotated[bool, typer.Option("--json", help="Print only the report, as JSON.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only errors.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Target = Annotated[
    str | None, typer.Option(help="Column or array to predict, or the IDX file of labels (data files only).")
]
Hidden = Annotated[str, typer.Option(help="Widths of the hidden layers of the MLP (data files only).")]
Ignore = Annotated[list[str] | None, typer.Option(help="Column to ignore (repeatable; data files only).")]
Task = Annotated[
    str | None,
    typer.Option(help="`classification` or `regression` (data files only). Default: chosen from the target."),
]
BatchSize = Annotated[
    int | None, typer.Option(min=1, help="Batch size (data files only). Default: 256, or all of a small data set.")
]
