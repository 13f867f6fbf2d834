import time
from pathlib import Path
from typing import Annotated

import typer

from natgrad._optimiser.checkpoint import load_checkpoint
from natgrad._problem import Problem
from natgrad.cli import options
from natgrad.cli.ending import Failure, finish, prepare, reported
from natgrad.cli.loading import TableOptions, load
from natgrad.cli.screen import Screen
from natgrad.experiment.compare import Comparison, Progress, TrialBudget
from natgrad.experiment.document import document
from natgrad.experiment.examination import Examination
from natgrad.experiment.methods import NATURAL
from natgrad.experiment.training import Folder, restored

EXAMPLES = "Examples: `natgrad inspect poisson-pde`, `natgrad inspect digits --checkpoint out/train`"


@reported
def inspect(
    problem: options.ProblemName = "digits",
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Look at trained parameters: the folder of a run, or a file by `ng.save_checkpoint`."),
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
    """Look at the geometry of a problem: rank and spectrum of its metric, the structure that every parameter gets, and
    how far approximate steps are from the exact one."""
    del debug
    start = time.perf_counter()
    loaded = load(problem, seed, TableOptions(target, hidden, tuple(ignore or ()), task, batch_size))
    prepare(out)
    trained = None if checkpoint is None else _trained(checkpoint, loaded.problem)
    with Screen(show=not (quiet or as_json)) as screen:
        screen.watch(Progress("geometry at the start", 0.0))
        examination = Examination(loaded.problem, {each.name: each.structure for each in NATURAL.values()})
        examination.look("at the start", 0, loaded.problem.params)
        if trained is not None:
            screen.watch(Progress("geometry of the checkpoint", 0.5))
            step, params = trained
            examination.look(f"after {step:,} steps" if step else "at the checkpoint", step, params)
    budget, spent = TrialBudget(None, None, start), time.perf_counter() - start
    found = Comparison(loaded.problem, budget, seed, [], examination.geometry(), "complete", spent)
    finish(document(found, command="inspect", imported=loaded.code), out, as_json=as_json, quiet=quiet)


def _trained(path: Path, problem: Problem) -> tuple[int, object]:
    """Parameters, and after how many steps, if that is known."""
    if path.is_file():
        return 0, load_checkpoint(path, problem.params)
    folder = Folder(path)
    if not folder.settings.exists():
        raise Failure(f"`{path}` is neither a file nor the folder of a run of `natgrad train`.")
    return restored(problem, NATURAL[folder.read()["structure"]], folder)
