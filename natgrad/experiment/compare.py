"""Methods side by side on one problem, each with the same budget."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax

from natgrad._problem import Problem
from natgrad.experiment.examination import Examination, GeometryReport
from natgrad.experiment.methods import METHODS, AbstractMethod, Natural
from natgrad.experiment.run import CompiledMethod, OutOfTime, Run, Scorer, sound_scorer

# How many points a curve has, besides the first.
ROUNDS = 50
# How many rates beyond its sweep a method may try while its best one is at an end.
EXTENSIONS = 4
# Parts of a budget of seconds: until when methods should be compiled, until when the geometry may be begun, until when
# either must be compiled, and until when there are steps.
COMPILING, LOOKING, COMPILED, STEPPING = 0.5, 0.45, 0.65, 0.95


class TrialBudget(NamedTuple):
    """How many steps every run may take, and how many seconds everything may take, compilation included."""

    steps: int | None
    seconds: float | None = None
    start: float = 0.0

    def until(self, fraction: float) -> float:
        """The time at which a fraction of the seconds is over."""
        return math.inf if self.seconds is None else self.start + fraction * self.seconds


class MethodRuns(NamedTuple):
    """What came of a method: its runs, one for each of its settings; or why there are none."""

    method: AbstractMethod
    program: CompiledMethod | None
    runs: list[Run]
    status: str
    note: str

    @property
    def best(self) -> Run | None:
        """The run with the lowest loss."""
        return min(self.runs, key=lambda run: run.lowest, default=None)


class Comparison(NamedTuple):
    """Everything that was found out."""

    problem: Problem
    budget: TrialBudget
    seed: int
    outcomes: list[MethodRuns]
    geometry: GeometryReport | None
    status: str
    seconds: float

    @property
    def compilation(self) -> float:
        return math.fsum(each.program.seconds for each in self.outcomes if each.program is not None)


class Progress(NamedTuple):
    """How far a comparison is: what is done now, which part of the work is done, and by the method at work."""

    stage: str
    done: float
    outcome: MethodRuns | None = None


Watch = Callable[[Progress], None]


def compare(
    problem: Problem,
    budget: TrialBudget,
    *,
    methods: Sequence[AbstractMethod] = tuple(METHODS.values()),
    seed: int = 0,
    watch: Watch = lambda progress: None,
) -> Comparison:
    """Run every method with every one of its settings for the same budget, in turns, so that whatever else the machine
    does meets them all and an interruption leaves them equally far. Ctrl-C ends it early with what there is."""
    found: dict[str, MethodRuns] = {}
    geometry, status = None, "complete"
    try:
        score = sound_scorer(problem)
        for outcome in _prepared(problem, budget, methods, seed, watch):
            found[outcome.method.name] = outcome
        examination = _examined(problem, budget, list(found.values()), watch)
        geometry = None if examination is None else examination.geometry()
        status = _raced(problem, budget, list(found.values()), seed, score, watch)
        if examination is not None and time.perf_counter() < budget.until(1.0):
            watch(Progress("geometry after training", 1.0))
            _examine_best(examination, list(found.values()), budget.until(1.0))
            geometry = examination.geometry()
    except KeyboardInterrupt:
        status = "interrupted"
    for run in (run for each in found.values() for run in each.runs if not run.is_over):
        run.status = status
    missing = lambda method: MethodRuns(method, None, [], "not run", "It was interrupted before its turn.")
    outcomes = [found.get(method.name) or missing(method) for method in methods]
    return Comparison(problem, budget, seed, outcomes, geometry, status, time.perf_counter() - budget.start)


def _prepared(
    problem: Problem, budget: TrialBudget, methods: Sequence[AbstractMethod], seed: int, watch: Watch
) -> Iterator[MethodRuns]:
    """Every method, compiled, as long as there is time: first one of each kind, then those that compile fast."""
    by_kind = sorted(methods, key=lambda each: each.kind)
    first = [
        next(each for each in by_kind if each.kind == kind) for kind in dict.fromkeys(each.kind for each in by_kind)
    ]
    longest: dict[str, float] = {}
    for method in [*first, *(each for each in by_kind if each not in first)]:
        watch(Progress(f"compiling {method.name}", 0.0))
        refusal = method.refusal(problem)
        if refusal is None and time.perf_counter() + longest.get(method.kind, 0.0) > budget.until(COMPILING):
            refusal = "There was no time left to compile it."
        if refusal is not None:
            yield MethodRuns(method, None, [], "not run", refusal)
            continue
        try:
            program = CompiledMethod.compiled(method, problem, seed, budget.until(COMPILED))
        except (OutOfTime, ValueError, TypeError, RuntimeError) as error:
            yield MethodRuns(method, None, [], "not run" if isinstance(error, OutOfTime) else "failed", str(error))
            continue
        longest[method.kind] = max(program.seconds, longest.get(method.kind, 0.0))
        runs = [Run(program, tried, problem, seed) for tried in method.sweep]
        yield MethodRuns(method, program, runs, "interrupted", program.note)


def _examined(problem: Problem, budget: TrialBudget, outcomes: list[MethodRuns], watch: Watch) -> Examination | None:
    if time.perf_counter() > budget.until(LOOKING) or not any(each.runs for each in outcomes):
        return None
    watch(Progress("geometry at the start", 0.0))
    structures = {each.method.name: each.method.structure for each in outcomes if isinstance(each.method, Natural)}
    examination = Examination(problem, structures)
    examination.look("at the start", 0, problem.params, budget.until(COMPILED))
    return examination


def _examine_best(examination: Examination, outcomes: list[MethodRuns], deadline: float) -> None:
    runs = [run for each in outcomes for run in each.runs if math.isfinite(run.lowest)]
    best = min(runs, key=lambda run: run.lowest, default=None)
    if best is not None and best.steps:
        name = f"after {best.steps:,} steps of {best.program.method.name}"
        examination.look(name, best.steps, best.params, deadline)


def _raced(
    problem: Problem, budget: TrialBudget, outcomes: list[MethodRuns], seed: int, score: Scorer, watch: Watch
) -> str:
    """Take turns until all runs are over or the time is; then follow the best rates beyond the ends of their sweeps."""
    runs = [(each, run) for each in outcomes for run in each.runs]
    if not runs:
        return "complete" if budget.seconds is None else "out of time"
    start = time.perf_counter()
    jax.block_until_ready(score(problem.params))
    looks = ROUNDS * (time.perf_counter() - start)
    share = max(0.0, budget.until(STEPPING) - start) / len(runs) - looks
    is_done = _in_turns(runs, budget, share, score, lambda done, each: watch(Progress("training", done, each)))
    for outcome in outcomes:
        for _ in range(EXTENSIONS):
            has_time = budget.seconds is None or time.perf_counter() + share < budget.until(STEPPING)
            run = _extended(outcome, problem, seed) if is_done and has_time else None
            if run is None:
                break
            named = f"{outcome.method.name} at {run.tried['learning_rate']:g}"
            told = lambda done, each, named=named: watch(Progress(named, done, each))
            is_done = _in_turns([(outcome, run)], budget, share, score, told)
    return "complete" if is_done else "out of time"


def _extended(outcome: MethodRuns, problem: Problem, seed: int) -> Run | None:
    """One more run, if the best one is at an end of the sweep."""
    best = outcome.best
    if best is None or outcome.program is None or len(outcome.runs) < 2:
        return None
    # Where all rates diverge, the best is the first of them.
    for end, above in ((0, False), (-1, True)):
        tried = outcome.method.beyond(best.tried, above=above)
        if best is outcome.runs[end] and tried is not None:
            run = Run(outcome.program, tried, problem, seed)
            outcome.runs.insert(len(outcome.runs) if above else 0, run)
            return run
    return None


def _in_turns(
    runs: list[tuple[MethodRuns, Run]],
    budget: TrialBudget,
    share: float,
    score: Scorer,
    tell: Callable[[float, MethodRuns], None],
) -> bool:
    """Let every run use up its budget, in turns of a round's part of it; or stop at the end of the time."""
    for _, run in runs:
        run.look(score)
    for turn in range(1, ROUNDS + 1):
        for place, (outcome, run) in enumerate(runs):
            if time.perf_counter() > budget.until(STEPPING):
                return False
            if not run.is_over and _advance(run, turn / ROUNDS, budget, share):
                run.look(score)
            if not run.is_over and _part(run, budget, share) >= 1:
                run.status = "complete"
            tell((turn - 1 + (place + 1) / len(runs)) / ROUNDS, outcome)
    return True


def _advance(run: Run, fraction: float, budget: TrialBudget, share: float) -> bool:
    """Step until a fraction of its budget is used up, and say whether there was a step."""
    before = run.steps
    try:
        while _part(run, budget, share) < fraction and time.perf_counter() < budget.until(STEPPING):
            run.advance()
    except RuntimeError as error:
        # Such as no memory left; the other methods go on.
        run.status, run.note = "failed", str(error)
    return run.steps > before


def _part(run: Run, budget: TrialBudget, share: float) -> float:
    """How much of its steps or of its share of the seconds a run has used."""
    by_steps = 0.0 if budget.steps is None else run.steps / budget.steps
    return max(by_steps, run.seconds / max(share, 1e-9))
