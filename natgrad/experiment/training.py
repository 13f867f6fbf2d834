"""Train with one method in a folder that holds the settings, the log and the checkpoints, so that it can be resumed."""

import hashlib
import importlib.metadata
import json
import math
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from natgrad._atomic_write import write_whole
from natgrad._optimiser.checkpoint import Checkpoints
from natgrad._optimiser.info import STEP_RESULTS, Info
from natgrad._problem import Problem
from natgrad.experiment.compare import STEPPING, Comparison, MethodRuns, Progress, TrialBudget, Watch, unwatched
from natgrad.experiment.examination import Examination, GeometryReport
from natgrad.experiment.methods import Natural
from natgrad.experiment.run import CompiledMethod, Reading, Run, Scorer, sound_scorer

# Settings that must not change when a run is resumed, and the words for a change of each.
COMPARED = {
    "structure": "another structure",
    "seed": "another random seed",
    "batch_size": "another batch size",
    "data": "other data or initial parameters",
    "model": "another model or objective",
}


class Folder(NamedTuple):
    """The folder of a run: `run.json` with its settings, `log.jsonl`, and `checkpoints/`."""

    path: Path

    @property
    def settings(self) -> Path:
        return self.path / "run.json"

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.path / "checkpoints")

    def start(self, settings: dict[str, Any], *, resume: bool) -> None:
        """Start a run here; or with `resume`, check that the run here was started with the same settings."""
        if self.settings.exists() and not resume:
            raise ValueError(
                f"`{self.path}` already holds a run. Continue it with `--resume`, or choose another `--out`."
            )
        if not resume:
            write_whole(self.settings, json.dumps(settings, indent=2) + "\n")
        elif not self.settings.exists():
            raise ValueError(f"There is no run in `{self.path}` to resume. Leave out `--resume` to start one.")
        else:
            before = self.read()
            changed = [text for name, text in COMPARED.items() if before.get(name) != settings[name]]
            if changed:
                raise ValueError(
                    f"The run in `{self.path}` was started with {' and '.join(changed)}. Resume it with the same "
                    "problem and options, or start another run in another folder with `--out`."
                )

    def read(self) -> dict[str, Any]:
        """The settings with which the run was started."""
        return json.loads(self.settings.read_text())

    def lines(self, until: int) -> list[dict[str, Any]]:
        """The lines of the log up to a step, without a last line that an interruption cut short."""
        if not self.log.exists():
            return []
        lines = []
        for text in self.log.read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                break
        return [line for line in lines if line["step"] <= until]


def run_settings(problem: Problem, name: str, structure: str, seed: int) -> dict[str, Any]:
    """The settings of a run, with data and model by their fingerprints."""
    # A function cannot be compared with the function of another process, but its program can.
    jaxpr = str(jax.make_jaxpr(problem.loss)(problem.params, problem.batch(0, seed)))
    return {
        "natgrad": importlib.metadata.version("natgrad"),
        "problem": name,
        "structure": structure,
        "seed": seed,
        "batch_size": problem.batch_size,
        "data": fingerprint((problem.params, problem.data, problem.held_out)),
        # Without addresses in memory, which differ from process to process.
        "model": hashlib.sha256(re.sub(r"0x[0-9a-f]+", "", jaxpr).encode()).hexdigest(),
    }


def fingerprint(tree: Any) -> str:
    """A hash of the structure of a tree and of all its arrays."""
    digest = hashlib.sha256(str(jax.tree.structure(tree)).encode())
    for leaf in jax.tree.leaves(tree):
        array = np.ascontiguousarray(leaf)
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


# How many points the curve of a run has, and how many checkpoints a run writes by default.
POINTS, CHECKPOINTS = 50, 10

Write = Callable[[dict[str, Any]], None]


def unwritten(line: dict[str, Any]) -> None:
    """Write a line of the log nowhere else."""
    del line


def train(
    problem: Problem,
    method: Natural,
    budget: TrialBudget,
    folder: Folder,
    *,
    seed: int = 0,
    checkpoint_every: int | None = None,
    watch: Watch = unwatched,
    write: Write = unwritten,
) -> Comparison:
    """Train from the newest checkpoint in a folder, or from the start, to the end of the budget.

    An interrupted run continues bit for bit: its parameters after a given number of steps do not depend on the
    interruption. Every line of the log is also passed to `write`."""
    watch(Progress(f"compiling {method.name}", 0.0))
    score = sound_scorer(problem)
    run = Run(CompiledMethod.compile(method, problem, seed, budget.until(STEPPING)), {}, problem, seed)
    outcome = MethodRuns(method, run.program, [run], "interrupted", run.program.note)
    write_whole(folder.log, "".join(json.dumps(line) + "\n" for line in _restore(run, folder)))
    period = checkpoint_every or max(1, (budget.steps or 1000) // CHECKPOINTS)
    geometry = None
    try:
        with folder.log.open("a") as log:
            for line in _take_steps(run, budget, score):
                log.write(json.dumps(line) + "\n")
                log.flush()
                write(line)
                if run.steps % period == 0:
                    _save(run, folder)
                watch(Progress("training", _done(run, budget), outcome))
        run.status = run.status if run.is_over else _ending(run, budget)
        _save(run, folder)
        geometry = _examine_end(problem, method, run, budget, watch)
    except KeyboardInterrupt:
        run.status = run.status if run.is_over else "interrupted"
        _save(run, folder)
    status = run.status if run.status in ("interrupted", "out of time") else "complete"
    return Comparison(problem, budget, seed, [outcome], geometry, status, time.perf_counter() - budget.start)


def restore_params(problem: Problem, method: Natural, folder: Folder) -> tuple[int, Any]:
    """The step of the newest checkpoint in a folder, and its parameters."""
    step, (params, _) = folder.checkpoints.restore((problem.params, method.init(problem, {})))
    return step, params


def _examine_end(
    problem: Problem, method: Natural, run: Run, budget: TrialBudget, watch: Watch
) -> GeometryReport | None:
    """Examine the geometry where the run ended, if there is time and the run did not diverge."""
    if time.perf_counter() > budget.until(1.0) or run.status == "diverged":
        return None
    watch(Progress("geometry", 1.0))
    examination = Examination(problem, {method.name: method.structure})
    # The report is to be there within 20 seconds of the end of the budget; half of them are for this.
    examination.look(f"after {run.steps:,} steps", run.steps, run.params, budget.until(1.0) + 10)
    return examination.geometry()


def _take_steps(run: Run, budget: TrialBudget, score: Scorer) -> Iterator[dict[str, Any]]:
    """Step to the end of the budget and yield a line of the log a step, with the losses at every point of the curve."""
    steps = math.inf if budget.steps is None else budget.steps
    every = max(1, (budget.steps or 500) // POINTS)
    if not run.curve:
        yield _line(run, None, run.look(score))
    while run.steps < steps and time.perf_counter() < budget.until(STEPPING) and not run.is_over:
        info = run.advance()
        is_point = run.steps % every == 0 or run.steps >= steps
        yield _line(run, info, run.look(score) if is_point else None)
        if bool(info.result == STEP_RESULTS.too_many_rejections):
            run.status = "failed"


def _ending(run: Run, budget: TrialBudget) -> str:
    """The status of a run that neither failed nor was interrupted."""
    is_done = run.steps > 0 if budget.steps is None else run.steps >= budget.steps
    return "complete" if is_done else "out of time"


def _line(run: Run, info: Info | None, point: Reading | None) -> dict[str, Any]:
    """A line of the log: the step, with the losses if a point of the curve was recorded there."""
    line: dict[str, Any] = {"step": run.steps, "seconds": run.seconds}
    if info is not None:
        line |= {name: _number(getattr(info, name)) for name in ("damping", "step_size")}
        line |= {"batch_loss": _number(info.loss), "accepted": bool(info.accepted)}
        line |= {} if bool(info.result == STEP_RESULTS.successful) else {"result": STEP_RESULTS[info.result]}
    if point is not None:
        metrics = {name: _number(value) for name, value in point.metrics.items()}
        line |= {"loss": _number(point.loss), "held_out_loss": _number(point.held_out_loss), "metrics": metrics}
    return line


def _restore(run: Run, folder: Folder) -> list[dict[str, Any]]:
    """Set a run to its newest checkpoint, and return the log up to there."""
    checkpoints = folder.checkpoints
    if not checkpoints.steps():
        return []
    run.steps, (run.params, run.state) = checkpoints.restore((run.params, run.state))
    lines = folder.lines(run.steps)
    run.seconds = lines[-1]["seconds"] if lines else 0.0
    for line in (line for line in lines if "loss" in line):
        is_diverged = line["loss"] is None
        loss = math.nan if is_diverged else line["loss"]
        run.curve.append(Reading(line["step"], line["seconds"], loss, line["held_out_loss"], line["metrics"]))
        run.status = "diverged" if is_diverged else run.status
    return lines


def _save(run: Run, folder: Folder) -> None:
    folder.checkpoints.save(run.steps, (run.params, run.state))


def _done(run: Run, budget: TrialBudget) -> float:
    """The fraction of the budget that is used up."""
    if budget.steps:
        return min(1.0, run.steps / budget.steps)
    whole = math.inf if budget.seconds is None else STEPPING * budget.seconds
    return min(1.0, (time.perf_counter() - budget.start) / whole)


def _number(value: Any) -> float | None:
    """A number for JSON, which has no NaN and no infinity."""
    return None if value is None or not jnp.isfinite(value) else float(value)
