"""`natgrad inspect`: rank and spectrum of the metric, blocks, and the quality of approximate steps."""

import time
from pathlib import Path
from typing import Annotated

import typer

from natgrad._optimiser.checkpoint import load_checkpoint
from natgrad._problem import Problem
from natgrad.cli import options
from natgrad.cli.ending import Failure, finish, prepare, report_errors
from natgrad.cli.loading import TableOptions, load
from natgrad.cli.screen import Screen
from natgrad.experiment.compare import Comparison, Progress, TrialBudget
from natgrad.experiment.document import document
from natgrad.experiment.examination import Examination
from natgrad.experiment.methods import NATURAL
from natgrad.experiment.training import Folder, restore_params

EXAMPLES = "Examples: `natgrad inspect poisson-pde`, `natgrad inspect digits --checkpoint out/train`"


@report_errors
def inspect(
    problem: options.ProblemName = "digits",
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Also inspect trained parameters: folder of a run, or file of `ng.save_checkpoint`."),
    ] = None,
    seed: options.Seed = 0,
    out: options.Out = Path("out/inspect"),
    target: options.Target = None,
    hidden: options.Hidden = "64,64",
    ignore: options.Ignore = None,
    task: options.Task = None,
    batch_size: options.BatchSize = None,
    as_json: options.Json = False,
    quiet: options.Quiet = False,
    debug: options.Debug = False,
) -> None:
    """Inspect the geometry of a problem: rank and spectrum of its metric, the block of every parameter, and how far
    approximate steps are from the exact natural-gradient step."""
    del debug
    start = time.perf_counter()
    loaded = load(problem, seed, TableOptions(target, hidden, tuple(ignore or ()), task, batch_size))
    prepare(out)
    trained = None if checkpoint is None else _load_params(checkpoint, loaded.problem)
    with Screen(show=not (quiet or as_json)) as screen:
        screen.watch(Progress("geometry at the start", 0.0))
        examination = Examination(loaded.problem, {method.name: method.structure for method in NATURAL.values()})
        examination.look("at the start", 0, loaded.problem.params)
        if trained is not None:
            screen.watch(Progress("geometry of the checkpoint", 0.5))
            step, params = trained
            examination.look(f"after {step:,} steps" if step else "at the checkpoint", step, params)
    budget, spent = TrialBudget(None, None, start), time.perf_counter() - start
    comparison = Comparison(loaded.problem, budget, seed, [], examination.geometry(), "complete", spent)
    report = document(comparison, command="inspect", problem_code=loaded.code)
    finish(report, out, as_json=as_json, quiet=quiet)


def _load_params(path: Path, problem: Problem) -> tuple[int, object]:
    """The step and the parameters of a checkpoint; the step is 0 for a file, which does not record it."""
    if path.is_file():
        return 0, load_checkpoint(path, problem.params)
    folder = Folder(path)
    if not folder.settings.exists():
        raise Failure(
            f"`{path}` is neither a file nor the folder of a run. Give the `--out` folder of `natgrad train`."
        )
    return restore_params(problem, NATURAL[folder.read()["structure"]], folder)
