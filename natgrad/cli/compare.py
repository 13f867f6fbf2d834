import time
from pathlib import Path
from typing import Annotated, Any

import typer

from natgrad.cli import options
from natgrad.cli.ending import Failure, finish, prepare, reported
from natgrad.cli.loading import TableOptions, load
from natgrad.cli.screen import Screen
from natgrad.experiment.compare import TrialBudget
from natgrad.experiment.compare import compare as compare_methods
from natgrad.experiment.document import document
from natgrad.experiment.methods import METHODS

EXAMPLES = "Examples: `natgrad compare`, `natgrad compare diabetes --seconds 60`, `natgrad compare mine.py:problem`"


@reported
def compare(
    problem: options.ProblemName = "digits",
    steps: options.Steps = None,
    seconds: options.Seconds = None,
    seed: options.Seed = 0,
    out: options.Out = Path("out/compare"),
    methods: Annotated[
        str, typer.Option(help=f"Which to compare, out of {', '.join(METHODS)}, separated by commas.")
    ] = ",".join(METHODS),
    target_loss: Annotated[
        float | None, typer.Option(help="The loss to reach. By default the lowest of the first-order methods.")
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
    """Try structures of the metric and first-order methods on a problem, and write a report.

    Every run gets the same number of steps (or, with `--seconds`, of seconds). First-order methods get one run for
    every learning rate of a sweep, and the best of them counts. Ctrl-C ends it with a report of what there is."""
    del debug
    start = time.perf_counter()
    table = TableOptions(target, hidden, tuple(ignore or ()), task, batch_size)
    loaded = load(problem, seed, table)
    chosen = [_method(name) for name in dict.fromkeys(map(str.strip, methods.split(",")))]
    prepare(out)
    limit = steps if steps is not None or seconds is not None else loaded.problem.steps
    with Screen(show=not (quiet or as_json)) as screen:
        found = compare_methods(
            loaded.problem, TrialBudget(limit, seconds, start), methods=chosen, seed=seed, watch=screen.watch
        )
    report = document(found, command="compare", imported=loaded.code, target=target_loss)
    finish(report, out, as_json=as_json, quiet=quiet)
    if not any(each["curve"] for each in report["methods"]):
        raise Failure("No method could run; the table and the report say why.")


def _method(name: str) -> Any:
    if name not in METHODS:
        raise typer.BadParameter(f"there is no method `{name}`. Choose from {', '.join(METHODS)}.")
    return METHODS[name]
