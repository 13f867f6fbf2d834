"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from natgrad.problems import PROBLEMS


def complete_problem(incomplete: str) -> list[tuple[str, str]]:
    return [(name, each.about) for name, each in PROBLEMS.items() if name.startswith(incomplete)]


ProblemName = Annotated[
    str,
    typer.Argument(
        metavar="[PROBLEM]",
        help=f"One of {', '.join(PROBLEMS)}; or `file.py:name`, a function that returns an `ng.Problem`; or a data "
        "file (CSV, NPZ, IDX), with `--target`.",
        autocompletion=complete_problem,
    ),
]
Steps = Annotated[int | None, typer.Option(min=1, help="Steps a run. By default as many as the problem asks for.")]
Seconds = Annotated[
    float | None, typer.Option(min=1.0, help="Seconds for everything, compilation included. By default no limit.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of initial parameters, batches and samples.")]
Out = Annotated[Path, typer.Option(help="The folder to write to, made if need be.")]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON, and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show where an error comes from.")]
Target = Annotated[
    str | None, typer.Option(help="Of a data file: the column or array to predict, or the IDX file of labels.")
]
Hidden = Annotated[str, typer.Option(help="Of a data file: the widths of the hidden layers.")]
Ignore = Annotated[list[str] | None, typer.Option(help="Of a data file: a column to leave out; may be given again.")]
Task = Annotated[
    str | None,
    typer.Option(help="Of a data file: `classification` or `regression`. By default as the target looks."),
]
BatchSize = Annotated[int | None, typer.Option(min=1, help="Of a data file: examples a step. By default all, or 256.")]
