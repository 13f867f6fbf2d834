"""`natgrad compare`: natural gradients and first-order methods on one problem, with a report."""

import time
from pathlib import Path
from typing import Annotated

import typer

from natgrad.cli import options
from natgrad.cli.ending import Failure, finish, prepare, report_errors
from natgrad.cli.loading import TableOptions, load
from natgrad.cli.screen import Screen
from natgrad.experiment.compare import TrialBudget
from natgrad.experiment.compare import compare as compare_methods
from natgrad.experiment.document import document
from natgrad.experiment.methods import METHODS, AbstractMethod

EXAMPLES = "Examples: `natgrad compare`, `natgrad compare diabetes --seconds 60`, `natgrad compare mine.py:problem`"


@report_errors
def compare(
    problem: options.ProblemName = "digits",
    steps: options.Steps = None,
    seconds: options.Seconds = None,
    seed: options.Seed = 0,
    out: options.Out = Path("out/compare"),
    methods: Annotated[
        str, typer.Option(help=f"Methods to compare, separated by commas: {', '.join(METHODS)}.")
    ] = ",".join(METHODS),
    target_loss: Annotated[
        float | None, typer.Option(help="Loss to reach. Default: the lowest loss of the best first-order method.")
    ] = None,
    target: options.Target = None,
    hidden: options.Hidden = "64,64",
    ignore: options.Ignore = None,
    task: options.Task = None,
    batch_size: options.BatchSize = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Compare natural-gradient and first-order methods on a problem, and write a report.

    Every run gets the same number of steps (or, with `--seconds`, of seconds). First-order methods get a learning-rate
    sweep, and their best run counts. Ctrl-C stops early and still writes a report."""
    del debug
    start = time.perf_counter()
    table = TableOptions(target, hidden, tuple(ignore or ()), task, batch_size)
    loaded = load(problem, seed, table)
    named = [_method(name) for name in dict.fromkeys(map(str.strip, methods.split(",")))]
    prepare(out)
    limit = steps if steps is not None or seconds is not None else loaded.problem.steps
    with Screen(show=not (quiet or as_json)) as screen:
        comparison = compare_methods(
            loaded.problem, TrialBudget(limit, seconds, start), methods=named, seed=seed, watch=screen.watch
        )
    report = document(comparison, command="compare", problem_code=loaded.code, target=target_loss)
    finish(report, out, as_json=as_json, quiet=quiet)
    if not any(method["curve"] for method in report["methods"]):
        raise Failure("No method could run. The report gives the reason for each method.")


def _method(name: str) -> AbstractMethod:
    if name not in METHODS:
        raise typer.BadParameter(f"there is no method `{name}`. Choose from {', '.join(METHODS)}.")
    return METHODS[name]
