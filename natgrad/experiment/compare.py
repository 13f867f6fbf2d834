"""Compare methods on one problem: every run gets the same budget of steps or seconds, and the runs take turns."""

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
# How many learning rates beyond its sweep a method may try while its best one is at an end.
EXTENSIONS = 4
# Fractions of a budget of seconds: when the last compilation of a method may start, when the examination of the
# geometry may start, when every compilation is given up, and when the steps end. The rest is for the report.
COMPILING, LOOKING, COMPILED, STEPPING = 0.5, 0.45, 0.65, 0.95


class TrialBudget(NamedTuple):
    """How many steps each run may take, and how many seconds everything may take, compilation included.

    `steps` or `seconds` is `None` where there is no limit; `start` is the value of `time.perf_counter()` at which the
    seconds began."""

    steps: int | None
    seconds: float | None = None
    start: float = 0.0

    def until(self, fraction: float) -> float:
        """The value of `time.perf_counter()` at which a fraction of the seconds is over."""
        return math.inf if self.seconds is None else self.start + fraction * self.seconds


class MethodRuns(NamedTuple):
    """A method with its runs, one for each of its settings, or with the reason why it has none."""

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
    """The result of a comparison: the runs of every method, and the geometry if there was time to examine it."""

    problem: Problem
    budget: TrialBudget
    seed: int
    outcomes: list[MethodRuns]
    geometry: GeometryReport | None
    status: str
    seconds: float

    @property
    def compilation(self) -> float:
        """Seconds spent compiling, over all methods."""
        return math.fsum(outcome.program.seconds for outcome in self.outcomes if outcome.program is not None)


class Progress(NamedTuple):
    """How far a comparison is: the name of the stage, the fraction of it that is done, and the method at work."""

    stage: str
    done: float
    outcome: MethodRuns | None = None


Watch = Callable[[Progress], None]


def unwatched(progress: Progress) -> None:
    """Show no progress."""
    del progress


def compare(
    problem: Problem,
    budget: TrialBudget,
    *,
    methods: Sequence[AbstractMethod] = tuple(METHODS.values()),
    seed: int = 0,
    watch: Watch = unwatched,
) -> Comparison:
    """Run every method with each of its settings for the same budget.

    The runs take turns: background load affects all of them equally, and Ctrl-C leaves them equally far. An interrupted
    comparison returns the partial results."""
    outcomes: dict[str, MethodRuns] = {}
    geometry, status = None, "complete"
    try:
        score = sound_scorer(problem)
        for outcome in _compile_methods(problem, budget, methods, seed, watch):
            outcomes[outcome.method.name] = outcome
        examination = _examine_start(problem, budget, list(outcomes.values()), watch)
        geometry = None if examination is None else examination.geometry()
        status = _race(problem, budget, list(outcomes.values()), score, watch)
        if examination is not None and time.perf_counter() < budget.until(1.0):
            watch(Progress("geometry after training", 1.0))
            _examine_best(examination, list(outcomes.values()), budget.until(1.0))
            geometry = examination.geometry()
    except KeyboardInterrupt:
        status = "interrupted"
    for run in (run for outcome in outcomes.values() for run in outcome.runs if not run.is_over):
        run.status = status
    for method in methods:
        missing = MethodRuns(method, None, [], "not run", "The comparison was interrupted before its turn.")
        outcomes.setdefault(method.name, missing)
    ordered = [outcomes[method.name] for method in methods]
    return Comparison(problem, budget, seed, ordered, geometry, status, time.perf_counter() - budget.start)


def _compile_methods(
    problem: Problem, budget: TrialBudget, methods: Sequence[AbstractMethod], seed: int, watch: Watch
) -> Iterator[MethodRuns]:
    """Compile the methods one after the other as long as there is time: first one of each kind, then the others.

    A method is skipped if the slowest compilation of its kind so far would not fit into the time left."""
    slowest: dict[str, float] = {}
    for method in _one_of_each_kind_first(methods):
        watch(Progress(f"compiling {method.name}", 0.0))
        refusal = method.refusal(problem)
        if refusal is None and time.perf_counter() + slowest.get(method.kind, 0.0) > budget.until(COMPILING):
            refusal = "There was no time left to compile it."
        if refusal is not None:
            yield MethodRuns(method, None, [], "not run", refusal)
            continue
        try:
            program = CompiledMethod.compile(method, problem, seed, budget.until(COMPILED))
        except (OutOfTime, ValueError, TypeError, RuntimeError) as error:
            yield MethodRuns(method, None, [], "not run" if isinstance(error, OutOfTime) else "failed", str(error))
            continue
        slowest[method.kind] = max(program.seconds, slowest.get(method.kind, 0.0))
        runs = [Run(program, settings, problem, seed) for settings in method.sweep]
        yield MethodRuns(method, program, runs, "interrupted", program.note)


def _one_of_each_kind_first(methods: Sequence[AbstractMethod]) -> list[AbstractMethod]:
    # If the time ends while methods are compiled, there is one of each kind to compare.
    by_kind = sorted(methods, key=lambda method: method.kind)
    first_of_kind: dict[str, AbstractMethod] = {}
    for method in by_kind:
        first_of_kind.setdefault(method.kind, method)
    first = list(first_of_kind.values())
    return first + [method for method in by_kind if method not in first]


def _examine_start(
    problem: Problem, budget: TrialBudget, outcomes: list[MethodRuns], watch: Watch
) -> Examination | None:
    """Examine the geometry at the initial parameters, if there is time and any method runs."""
    if time.perf_counter() > budget.until(LOOKING) or not any(outcome.runs for outcome in outcomes):
        return None
    watch(Progress("geometry at the start", 0.0))
    methods = [outcome.method for outcome in outcomes]
    structures = {method.name: method.structure for method in methods if isinstance(method, Natural)}
    examination = Examination(problem, structures)
    examination.look("at the start", 0, problem.params, budget.until(COMPILED))
    return examination


def _examine_best(examination: Examination, outcomes: list[MethodRuns], deadline: float) -> None:
    """Examine the geometry where the run with the lowest loss ended."""
    runs = [run for outcome in outcomes for run in outcome.runs if math.isfinite(run.lowest)]
    best = min(runs, key=lambda run: run.lowest, default=None)
    if best is not None and best.steps:
        name = f"after {best.steps:,} steps of {best.program.method.name}"
        examination.look(name, best.steps, best.params, deadline)


class _Race(NamedTuple):
    """Runs that take turns within one budget. `share` is how many seconds of stepping each of them may use."""

    budget: TrialBudget
    share: float
    score: Scorer

    def take_turns(self, runs: list[tuple[MethodRuns, Run]], stage: str, watch: Watch) -> bool:
        """Let every run use up its budget, one fiftieth at a turn; return false if the time ended first."""
        for _, run in runs:
            run.look(self.score)
        for turn in range(1, ROUNDS + 1):
            for place, (outcome, run) in enumerate(runs):
                if time.perf_counter() > self.budget.until(STEPPING):
                    return False
                if not run.is_over and self._advance(run, turn / ROUNDS):
                    run.look(self.score)
                if not run.is_over and self._used(run) >= 1:
                    run.status = "complete"
                watch(Progress(stage, (turn - 1 + (place + 1) / len(runs)) / ROUNDS, outcome))
        return True

    def has_time_for_another(self) -> bool:
        return self.budget.seconds is None or time.perf_counter() + self.share < self.budget.until(STEPPING)

    def _advance(self, run: Run, fraction: float) -> bool:
        """Step until the run has used a fraction of its budget; return whether there was a step."""
        steps_before = run.steps
        try:
            while self._used(run) < fraction and time.perf_counter() < self.budget.until(STEPPING):
                run.advance()
        except RuntimeError as error:
            # Out of memory, for example; the other methods go on.
            run.status, run.note = "failed", str(error)
        return run.steps > steps_before

    def _used(self, run: Run) -> float:
        """The fraction of its steps, or of its share of the seconds, that a run has used."""
        by_steps = 0.0 if self.budget.steps is None else run.steps / self.budget.steps
        # Without any time left, the share is zero, and every run has used it up.
        return max(by_steps, run.seconds / max(self.share, 1e-9))


def _race(problem: Problem, budget: TrialBudget, outcomes: list[MethodRuns], score: Scorer, watch: Watch) -> str:
    """Let all runs take turns, then extend the sweeps whose best learning rate is at an end; return the status."""
    runs = [(outcome, run) for outcome in outcomes for run in outcome.runs]
    if not runs:
        return "complete" if budget.seconds is None else "out of time"
    start = time.perf_counter()
    # Scoring takes time from the budget that no run is charged for.
    jax.block_until_ready(score(problem.params))
    scoring = ROUNDS * (time.perf_counter() - start)
    race = _Race(budget, max(0.0, budget.until(STEPPING) - start) / len(runs) - scoring, score)
    is_done = race.take_turns(runs, "training", watch)
    for outcome in outcomes:
        for _ in range(EXTENSIONS):
            run = _extend_sweep(outcome) if is_done and race.has_time_for_another() else None
            if run is None:
                break
            stage = f"learning rate {run.settings['learning_rate']:g}, {outcome.method.name}"
            is_done = race.take_turns([(outcome, run)], stage, watch)
    return "complete" if is_done else "out of time"


def _extend_sweep(outcome: MethodRuns) -> Run | None:
    """Add a run beyond the end of the sweep at which the best run is, if it is at one."""
    best = outcome.best
    if best is None or outcome.program is None or len(outcome.runs) < 2:
        return None
    # Where all learning rates diverge, `min` returns the first run, so smaller ones are tried.
    for end, above in ((0, False), (-1, True)):
        settings = outcome.method.beyond(best.settings, above=above)
        if best is outcome.runs[end] and settings is not None:
            run = Run(outcome.program, settings, best.problem, best.seed)
            outcome.runs.insert(len(outcome.runs) if above else 0, run)
            return run
    return None
