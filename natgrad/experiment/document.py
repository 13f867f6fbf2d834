"""A comparison as a document of numbers and text, from which reports are made; `report/schema.json` describes it."""

import importlib.metadata
import math
import os
import platform
from typing import Any

import jax

from natgrad._block.structure_report import BlockReport
from natgrad._problem import Problem
from natgrad.experiment.compare import Comparison, MethodRuns
from natgrad.experiment.examination import GeometryReport
from natgrad.experiment.run import Run
from natgrad.experiment.verdict import Target, contenders, recommendations, target_of, verdict


def document(comparison: Comparison, *, command: str, problem_code: str, target: float | None = None) -> dict[str, Any]:
    """Everything a report shows, as numbers and text.

    `problem_code` is code that defines `problem`, for the recommendations. `target` is the loss to reach; by default
    the lowest loss of the best first-order method."""
    goal = target_of(comparison, target) if command == "compare" else None
    best = {contender.name: contender.run for contender in contenders(comparison, goal)}
    return {
        "schema": 1,
        "natgrad": importlib.metadata.version("natgrad"),
        "problem": _problem(comparison.problem),
        "settings": {
            "command": command,
            "steps": comparison.budget.steps,
            "seconds": comparison.budget.seconds,
            "seed": comparison.seed,
        },
        "status": comparison.status,
        "seconds": {"total": comparison.seconds, "compilation": comparison.compilation},
        "verdict": verdict(comparison, goal) if command == "compare" else _summary(comparison),
        "target": None if goal is None else goal._asdict(),
        "methods": [_method(outcome, best.get(outcome.method.name), goal) for outcome in comparison.outcomes],
        "geometry": None if comparison.geometry is None else _geometry(comparison.geometry),
        "recommended": [choice._asdict() for choice in recommendations(comparison, goal, problem_code)],
        "environment": environment(),
    }


def environment() -> dict[str, Any]:
    """Versions and hardware."""
    devices = jax.devices()
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "devices": f"{len(devices)} x {devices[0].device_kind}",
        "platform": platform.platform(),
        "processors": os.cpu_count() or 1,
    }


def _problem(problem: Problem) -> dict[str, Any]:
    kinds = {type(term.objective).__name__: getattr(term.objective, "family", None) for term in problem.terms.values()}
    names = [kind if family is None else type(family).__name__ for kind, family in kinds.items()]
    return {
        "name": problem.name,
        "about": problem.about,
        "parameters": problem.num_params,
        "examples": problem.num_examples,
        "batch_size": problem.batch_size,
        "held_out_examples": problem.num_held_out,
        "objective": ", ".join(names),
        "precision": str(jax.tree.leaves(problem.params)[0].dtype),
        "metrics": list(problem.metrics),
    }


def _method(outcome: MethodRuns, chosen: Run | None, goal: Target | None) -> dict[str, Any]:
    run = outcome.best if chosen is None else chosen
    last = run.curve[-1] if run is not None and run.curve else None
    reached = None if run is None or goal is None or chosen is None else run.first_at(goal.loss)
    return {
        "name": outcome.method.name,
        "kind": outcome.method.kind,
        "settings": {} if run is None else outcome.method.describe(run.problem, run.settings),
        "status": outcome.status if run is None else run.status,
        "note": " ".join(filter(None, [outcome.note, "" if run is None else run.note, _edge(outcome, run)])),
        "compilation": None if outcome.program is None else outcome.program.seconds,
        "seconds_per_step": run.seconds / run.steps if run is not None and run.steps else None,
        "state_bytes": None if outcome.program is None else outcome.program.state_bytes,
        "curve": [] if run is None else [point._asdict() for point in run.curve],
        "final_loss": None if last is None else last.loss,
        "lowest_loss": None if run is None or math.isinf(run.lowest) else run.lowest,
        "final_held_out_loss": None if last is None else last.held_out_loss,
        "final_metrics": {} if last is None else last.metrics,
        "steps_to_target": None if reached is None else reached.step,
        "seconds_to_target": None if reached is None else reached.seconds,
        "sweep": [_sweep_run(run) for run in outcome.runs] if len(outcome.runs) > 1 else [],
    }


def _edge(outcome: MethodRuns, run: Run | None) -> str:
    """A warning if the best learning rate is at an end of the sweep."""
    is_inside = run not in (outcome.runs[0], outcome.runs[-1]) if len(outcome.runs) > 1 else True
    if run is None or is_inside or math.isinf(run.lowest):
        return ""
    end, beyond = ("smallest", "smaller") if run is outcome.runs[0] else ("largest", "larger")
    rate = run.settings["learning_rate"]
    return f"Its best learning rate, {rate:g}, is the {end} tried; a {beyond} one may be better."


def _sweep_run(run: Run) -> dict[str, Any]:
    return {
        "settings": dict(run.settings),
        "status": run.status,
        "steps": run.steps,
        "seconds": run.seconds,
        "final_loss": run.curve[-1].loss if run.curve else None,
        "lowest_loss": None if math.isinf(run.lowest) else run.lowest,
    }


def _geometry(geometry: GeometryReport) -> dict[str, Any]:
    return {
        "points": [
            point._asdict() | {"condition": point.condition, "damping": damping}
            for point, damping in zip(geometry.points, geometry.damping, strict=True)
        ],
        "structure": [_block(row) for row in geometry.structure],
        "approximations": [approximation._asdict() for approximation in geometry.approximations],
    }


def _block(row: BlockReport) -> dict[str, Any]:
    note = row.reason or (f"with {row.shares}" if row.shares else "")
    return {
        "path": row.path,
        "shape": list(row.shape),
        "uses": row.uses,
        "structure": row.structure,
        "factors": [list(shape) for shape in row.factors],
        "numbers": row.numbers,
        "bytes": row.bytes,
        "note": note,
        "is_fallback": row.is_fallback,
    }


def _summary(comparison: Comparison) -> str:
    """The result of `train` or `inspect` in a sentence."""
    geometry = comparison.geometry
    sentences = []
    for outcome in comparison.outcomes:
        run = outcome.best
        if run is None or not run.curve:
            sentences.append(f"{outcome.method.name} did not run: {outcome.note.rstrip('.')}.")
        else:
            first, last = run.curve[0], run.curve[-1]
            sentences.append(
                f"{outcome.method.name} took the loss from {first.loss:.3g} to {last.loss:.3g} in {last.step:,} steps."
            )
    if not sentences and geometry is not None and geometry.points:
        point = geometry.points[-1]
        sentences.append(
            f"The metric has rank {point.rank:,} for {comparison.problem.num_params:,} parameters on "
            f"{point.examples:,} example{'s' if point.examples > 1 else ''}."
        )
    return " ".join(sentences)
