"""One method trained in a folder: checkpoints to go on from, a line of its log a step, and an end like any other's."""

import importlib.metadata
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from natgrad._optimiser.checkpoint import Checkpoints
from natgrad._optimiser.info import STEP_RESULTS, Info
from natgrad._problem import Problem
from natgrad.comparison.compare import STEPPING, Budget, Comparison, Outcome, Progress, Watch
from natgrad.comparison.geometry import Examination
from natgrad.comparison.methods import Natural
from natgrad.comparison.run import Point, Program, Run, scorer

# How many points the curve of a run has, and how many checkpoints are written, unless told otherwise.
POINTS, CHECKPOINTS = 50, 10


class Folder(NamedTuple):
    """The files of a run."""

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
        """Begin a run here, or make sure that this is the run to go on with."""
        if self.settings.exists() and not resume:
            raise ValueError(
                f"`{self.path}` holds a run already. Go on with it by `--resume`, or choose another folder by `--out`."
            )
        if resume and not self.settings.exists():
            raise ValueError(f"There is no run in `{self.path}` to resume. Leave out `--resume` to begin one.")
        if resume:
            before = self.read()
            changed = [name for name in settings if name != "natgrad" and before.get(name) != settings[name]]
            if changed:
                was = ", ".join(f"{name} {before.get(name)}, not {settings[name]}" for name in changed)
                raise ValueError(f"The run in `{self.path}` has {was}. Resume it as it was begun.")
        else:
            self.path.mkdir(parents=True, exist_ok=True)
            temporary = self.settings.with_suffix(".tmp")
            temporary.write_text(json.dumps(settings, indent=2) + "\n")
            os.replace(temporary, self.settings)

    def read(self) -> dict[str, Any]:
        return json.loads(self.settings.read_text())

    def lines(self, until: int) -> list[dict[str, Any]]:
        """What the log says up to a step. A last line that was cut short does not count."""
        if not self.log.exists():
            return []
        found = []
        for line in self.log.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        return [line for line in found if line["step"] <= until]


def described(problem: str, structure: str, seed: int) -> dict[str, Any]:
    """What must stay the same when a run is resumed."""
    return {"natgrad": importlib.metadata.version("natgrad"), "problem": problem, "structure": structure, "seed": seed}


def train(
    problem: Problem,
    method: Natural,
    budget: Budget,
    folder: Folder,
    *,
    seed: int = 0,
    checkpoint_every: int | None = None,
    watch: Watch = lambda progress: None,
    write: Callable[[dict[str, Any]], None] = lambda line: None,
) -> Comparison:
    """Train from the newest checkpoint in a folder, or from the start, to the end of the budget.

    The parameters after so many steps are the same, bit by bit, whether or not the run was interrupted. Every line of
    the log is also given to `write`."""
    watch(Progress(f"compiling {method.name}", 0.0))
    run = Run(Program.compiled(method, problem, seed), {}, problem, seed)
    outcome = Outcome(method, run.program, [run], "interrupted", run.program.note)
    lines = _restore(run, folder)
    period = checkpoint_every or max(1, (budget.steps or 1000) // CHECKPOINTS)
    score, status, geometry = scorer(problem), "complete", None
    with folder.log.open("w") as log:
        log.writelines(json.dumps(line) + "\n" for line in lines)
        log.flush()
        try:
            for line in _stepped(run, budget, score):
                log.write(json.dumps(line) + "\n")
                log.flush()
                write(line)
                if run.steps % period == 0:
                    _save(run, folder)
                done = run.steps / budget.steps if budget.steps else _spent(budget)
                watch(Progress("training", min(1.0, done), outcome))
            if run.status == "interrupted":
                is_done = budget.steps is not None and run.steps >= budget.steps
                run.status = status = "complete" if is_done or budget.steps is None else "out of time"
            _save(run, folder)
            watch(Progress("geometry", 1.0))
            examination = Examination(problem, {method.name: method.structure})
            examination.look(f"after {run.steps:,} steps", run.steps, run.params)
            geometry = examination.geometry()
        except KeyboardInterrupt:
            status = "interrupted"
            _save(run, folder)
    return Comparison(problem, budget, seed, [outcome], geometry, status, time.perf_counter() - budget.start)


def restored(problem: Problem, method: Natural, folder: Folder) -> tuple[int, Any]:
    """The newest parameters in a folder, and after how many steps."""
    step, (params, _) = folder.checkpoints.restore((problem.params, method.init(problem, {})))
    return step, params


def _stepped(run: Run, budget: Budget, score: Callable) -> Iterator[dict[str, Any]]:
    """Step to the end of the budget, looking at the run now and then."""
    steps = math.inf if budget.steps is None else budget.steps
    every = max(1, (budget.steps or 500) // POINTS)
    if not run.curve:
        yield _line(run, None, run.look(score))
    while run.steps < steps and time.perf_counter() < budget.until(STEPPING) and not run.is_over:
        info = run.advance()
        is_shown = run.steps % every == 0 or run.steps >= steps
        yield _line(run, info, run.look(score) if is_shown else None)
        if bool(info.result == STEP_RESULTS.too_many_rejections):
            run.status = "failed"


def _line(run: Run, info: Info | None, point: Point | None) -> dict[str, Any]:
    line: dict[str, Any] = {"step": run.steps, "seconds": run.seconds}
    if info is not None:
        line |= {name: _number(getattr(info, name)) for name in ("damping", "step_size")}
        is_fine = bool(info.result == STEP_RESULTS.successful)
        line |= {"batch_loss": _number(info.loss), "accepted": bool(info.accepted)}
        line |= {} if is_fine else {"result": STEP_RESULTS[info.result]}
    if point is not None:
        metrics = {name: _number(value) for name, value in point.metrics.items()}
        line |= {"loss": _number(point.loss), "held_out_loss": _number(point.held_out_loss), "metrics": metrics}
    return line


def _restore(run: Run, folder: Folder) -> list[dict[str, Any]]:
    """Put a run where the newest checkpoint was taken, and return the log up to there."""
    checkpoints = folder.checkpoints
    if not checkpoints.steps():
        return []
    run.steps, (run.params, run.state) = checkpoints.restore((run.params, run.state))
    lines = folder.lines(run.steps)
    run.seconds = lines[-1]["seconds"] if lines else 0.0
    shown = [line for line in lines if "loss" in line]
    finite = lambda value: math.nan if value is None else value
    run.curve = [
        Point(line["step"], line["seconds"], finite(line["loss"]), line["held_out_loss"], line["metrics"])
        for line in shown
    ]
    return lines


def _save(run: Run, folder: Folder) -> None:
    folder.checkpoints.save(run.steps, (run.params, run.state))


def _spent(budget: Budget) -> float:
    return 0.0 if budget.seconds is None else (time.perf_counter() - budget.start) / (STEPPING * budget.seconds)


def _number(value: Any) -> float | None:
    """JSON has no NaN."""
    return None if value is None or not jnp.isfinite(value) else float(value)
