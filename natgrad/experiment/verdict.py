"""Sum up a comparison: a target loss, which method reaches it first, and which one to use."""

import math
from typing import NamedTuple

from natgrad import _text
from natgrad.experiment.compare import Comparison, MethodRuns
from natgrad.experiment.run import Reading, Run

# Times that differ by less than this fraction are called equal.
EQUAL = 0.1
# A loss below this fraction of the target is worth a sentence.
FAR = 0.1


class Target(NamedTuple):
    """A loss to reach, and where it comes from."""

    loss: float
    source: str


class Contender(NamedTuple):
    """A method with its best run, and the point at which this run reached the target, if it did."""

    outcome: MethodRuns
    run: Run
    reached: Reading | None

    @property
    def name(self) -> str:
        return self.outcome.method.name

    @property
    def label(self) -> str:
        """The name with the learning rate."""
        rate = self.run.settings.get("learning_rate")
        return self.name if rate is None else f"{self.name} (learning rate {rate:g})"

    @property
    def speed(self) -> tuple[float, float]:
        """To order contenders: the seconds to the target, then the lowest loss."""
        return (math.inf if self.reached is None else self.reached.seconds, self.run.lowest)

    @property
    def steps_to_target(self) -> int | float:
        return math.inf if self.reached is None else self.reached.step


class Recommendation(NamedTuple):
    """A method to use: why, and the code that repeats its run."""

    title: str
    method: str
    reason: str
    code: str


def target_of(comparison: Comparison, loss: float | None = None) -> Target | None:
    """The loss to reach: `loss` if given, else the lowest one of the best first-order method, else of any method."""
    if loss is not None:
        return Target(loss, "as given")
    lowest: dict[str, float] = {}
    for outcome in comparison.outcomes:
        for run in outcome.runs:
            if run.curve and run.lowest < run.curve[0].loss:
                kind = outcome.method.kind
                lowest[kind] = min(run.lowest, lowest.get(kind, math.inf))
    # Not the lowest loss of all: a natural gradient often goes far below, and no other method would reach it.
    if "first-order" in lowest:
        return Target(lowest["first-order"], "the lowest loss of the best first-order method")
    return Target(lowest["natural"], "the lowest loss of any method") if lowest else None


def contenders(comparison: Comparison, target: Target | None) -> list[Contender]:
    """The best run of every method with a finite loss: the fastest to the target, or else the one with the lowest
    loss."""
    best = []
    for outcome in comparison.outcomes:
        runs = [run for run in outcome.runs if math.isfinite(run.lowest)]
        candidates = [Contender(outcome, run, None if target is None else run.first_at(target.loss)) for run in runs]
        if candidates:
            best.append(min(candidates, key=lambda contender: contender.speed))
    return best


def verdict(comparison: Comparison, target: Target | None) -> str:
    """The result of a comparison in two or three sentences."""
    methods = contenders(comparison, target)
    if not methods:
        return "No run has a finite loss, so the methods cannot be compared."
    if target is None:
        return f"No method lowered the initial loss of {_text.number(methods[0].run.curve[0].loss)}."
    natural = [contender for contender in methods if contender.outcome.method.kind == "natural"]
    first_order = [contender for contender in methods if contender.outcome.method.kind != "natural"]
    if natural and first_order:
        sentences = [_duel(natural, _fastest(first_order), target), _beyond(natural, target)]
    else:
        sentences = [_winner(methods)]
    return " ".join(filter(None, [*sentences, _held_out(methods)]))


def _winner(methods: list[Contender]) -> str:
    """The best of methods of one kind."""
    best = _fastest(methods)
    point = best.run.lowest_point
    if best.reached is None or best.reached == point:
        return f"{best.label} has the lowest loss, {_text.number(point.loss)} after {point.step:,} steps."
    return f"{best.label} reached a loss of {_text.number(best.reached.loss)} in {_path(best.reached)}."


def _duel(natural: list[Contender], rival: Contender, target: Target) -> str:
    """The natural-gradient methods against the best first-order method."""
    arrived = [contender for contender in natural if contender.reached is not None]
    loss = _text.number(target.loss)
    if rival.reached is None and not arrived:
        lowest = _lowest([*natural, rival])
        return (
            f"No method reached a loss of {loss}; {lowest.label} came closest with {_text.number(lowest.run.lowest)}."
        )
    if rival.reached is None:
        names = ", ".join(contender.name for contender in arrived)
        return (
            f"{names} reached a loss of {loss}. No first-order method did; {rival.label} came closest with "
            f"{_text.number(rival.run.lowest)}."
        )
    rival_path = _path(rival.reached)
    if not arrived:
        closest = _lowest(natural)
        return (
            f"{rival.label} is ahead: it reached a loss of {loss} in {rival_path}. No natural-gradient method did; "
            f"{closest.name} came closest with {_text.number(closest.run.lowest)}."
        )
    fast, short = _fastest(arrived), _shortest(arrived)
    assert fast.reached is not None and short.reached is not None
    # Seconds decide before steps: a step of a natural gradient costs several of the others.
    if fast.reached.seconds <= (1 - EQUAL) * rival.reached.seconds:
        return (
            f"{fast.name} is fastest: it reached a loss of {loss} in {_path(fast.reached)}. The best first-order "
            f"method, {rival.label}, took {rival_path}, {_ratio(rival.reached.seconds, fast.reached.seconds)} times as "
            "long."
        )
    if fast.reached.seconds <= (1 + EQUAL) * rival.reached.seconds:
        return (
            f"{fast.name} and {rival.name} are equally fast: {fast.name} reached a loss of {loss} in "
            f"{_path(fast.reached)}, the best first-order method, {rival.label}, in {rival_path}."
        )
    if short.reached.step < rival.reached.step:
        return (
            f"{short.name} needs fewer steps, {rival.name} less time: {short.name} reached a loss of {loss} in "
            f"{_path(short.reached)}, the best first-order method, {rival.label}, in {rival_path}."
        )
    return (
        f"{rival.label} is ahead: it reached a loss of {loss} in {rival_path}. {short.name} took "
        f"{_path(short.reached)}."
    )


def _beyond(natural: list[Contender], target: Target) -> str:
    """The natural-gradient method that went far below the target, if one did."""
    best = _lowest(natural)
    if best.reached is None or not best.run.lowest <= FAR * target.loss or target.loss <= 0:
        return ""
    return f"{best.name} went on to a loss of {_text.number(best.run.lowest)}."


def _held_out(methods: list[Contender]) -> str:
    """The lowest held-out loss at any point of any run."""
    lowest = [
        (loss, point.step, contender.label)
        for contender in methods
        for point in contender.run.curve
        if (loss := point.held_out_loss) is not None and math.isfinite(loss)
    ]
    if not lowest:
        return ""
    loss, step, label = min(lowest)
    return f"Best held-out loss: {label}, {_text.number(loss)} at step {step:,}."


def recommendations(comparison: Comparison, target: Target | None, problem_code: str) -> list[Recommendation]:
    """The fastest method as code, and the method with the fewest steps if that is another one.

    Where no method reached the target, the one with the lowest loss. `problem_code` is code that defines `problem`."""
    methods = contenders(comparison, target)
    arrived = [contender for contender in methods if contender.reached is not None]
    if arrived:
        fast, short = _fastest(arrived), _shortest(arrived)
        choices = {"Fastest": fast} | ({} if short is fast else {"Fewest steps": short})
    elif methods:
        choices = {"Lowest loss" if len(methods) > 1 else "As code": _lowest(methods)}
    else:
        choices = {}
    return [_recommend(title, contender, problem_code) for title, contender in choices.items()]


def _recommend(title: str, contender: Contender, problem_code: str) -> Recommendation:
    run, method = contender.run, contender.outcome.method
    imports = "import jax\n" + ("import natgrad as ng\n" if method.kind == "natural" else "import optax\n")
    point = run.lowest_point if contender.reached is None else contender.reached
    body = method.code(run.problem, run.settings).replace("{steps}", str(point.step)).replace("{seed}", str(run.seed))
    reason = (
        f"{_path(contender.reached)} to the target."
        if contender.reached is not None
        else f"A loss of {_text.number(run.lowest)} after {point.step:,} steps."
    )
    return Recommendation(title, contender.label, reason, f"{imports}\n{problem_code}\n{body}")


def _fastest(methods: list[Contender]) -> Contender:
    return min(methods, key=lambda contender: contender.speed)


def _shortest(methods: list[Contender]) -> Contender:
    return min(methods, key=lambda contender: contender.steps_to_target)


def _lowest(methods: list[Contender]) -> Contender:
    return min(methods, key=lambda contender: contender.run.lowest)


def _path(point: Reading) -> str:
    return f"{point.step:,} steps and {_text.duration(point.seconds)}"


def _ratio(more: float, less: float) -> str:
    return f"{more / less:.2g}" if less > 0 else "many"
