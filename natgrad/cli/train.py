"""`natgrad train`: one method on one problem, with checkpoints, a log and a report."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from natgrad._problem import Problem
from natgrad.cli import options
from natgrad.cli.ending import Failure, finish, prepare, report_errors
from natgrad.cli.loading import TableOptions, load
from natgrad.cli.screen import Screen
from natgrad.experiment.compare import TrialBudget
from natgrad.experiment.document import document
from natgrad.experiment.methods import NATURAL, Natural
from natgrad.experiment.training import Folder, run_settings, unwritten
from natgrad.experiment.training import train as train_method

EXAMPLES = (
    "Examples: `natgrad train digits --structure ekfac --out run`, `natgrad train digits --out run --resume`, "
    "`natgrad train houses.csv --target price --hidden 64,64`"
)


@report_errors
def train(
    problem: options.ProblemName = "digits",
    structure: Annotated[str, typer.Option(help=f"Approximation of the metric: {', '.join(NATURAL)}.")] = "kfac",
    steps: options.Steps = None,
    seconds: options.Seconds = None,
    seed: options.Seed = 0,
    out: options.Out = Path("out/train"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the output folder, bit for bit.")
    ] = False,
    checkpoint_every: Annotated[
        int | None, typer.Option(min=1, help="Steps between checkpoints. Default: a tenth of the steps.")
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also write events for TensorBoard.")] = False,
    target: options.Target = None,
    hidden: options.Hidden = "64,64",
    ignore: options.Ignore = None,
    task: options.Task = None,
    batch_size: options.BatchSize = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Train with the natural gradient, and write checkpoints, a log and a report.

    Writes `log.jsonl` (one line a step), `checkpoints/` (the newest three) and the report. Resume an interrupted run
    with `--resume`: it continues bit for bit."""
    del debug
    start = time.perf_counter()
    loaded = load(problem, seed, TableOptions(target, hidden, tuple(ignore or ()), task, batch_size))
    method, folder = _method(structure, loaded.problem), Folder(out)
    prepare(out)
    folder.start(run_settings(loaded.problem, problem, structure, seed), resume=resume)
    limit = steps if steps is not None or seconds is not None else loaded.problem.steps
    with Screen(show=not (quiet or as_json)) as screen:
        comparison = train_method(
            loaded.problem,
            method,
            TrialBudget(limit, seconds, start),
            folder,
            seed=seed,
            checkpoint_every=checkpoint_every,
            watch=screen.watch,
            write=_tensorboard_writer(out) if tensorboard else unwritten,
        )
    report = document(comparison, command="train", problem_code=loaded.code)
    finish(report, out, as_json=as_json, quiet=quiet)
    (run,) = comparison.outcomes[0].runs
    if run.status in ("diverged", "failed"):
        raise Failure(f"The run {run.status} after {run.steps:,} steps. See the log: {folder.log}.")


def _method(structure: str, problem: Problem) -> Natural:
    if structure not in NATURAL:
        raise typer.BadParameter(f"there is no structure `{structure}`. Choose from {', '.join(NATURAL)}.")
    refusal = NATURAL[structure].refusal(problem)
    if refusal is not None:
        raise Failure(f"This problem is too large for `{structure}`: {refusal} Choose another `--structure`.")
    return NATURAL[structure]


def _tensorboard_writer(out: Path) -> Callable[[dict[str, Any]], None]:
    """A function that writes the numbers of a line of the log as TensorBoard events."""
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise Failure(f"{error}. Install it with `pip install 'natgrad[tensorboard]'`.") from error
    writer = SummaryWriter(str(out / "tensorboard"))

    def write(line: dict[str, Any]) -> None:
        numbers = line | {f"metrics/{name}": value for name, value in line.get("metrics", {}).items()}
        for name, value in numbers.items():
            if isinstance(value, float):
                writer.add_scalar(name.replace(" ", "_"), value, line["step"])
        if "loss" in line:
            writer.flush()

    return write
