"""What a comparison comes to: a target, who reaches it first, and what to use."""

import math
from typing import NamedTuple

from natgrad import _text
from natgrad.experiment.compare import Comparison, MethodRuns
from natgrad.experiment.run import Reading, Run

# Times that differ by less than this part are called equal.
EQUAL = 0.1
# Below this part of the target, a loss is worth a word.
FAR = 0.1


class Target(NamedTuple):
    """A loss to reach, and where it comes from."""

    loss: float
    source: str


class Contender(NamedTuple):
    """A method with its best run, and where that reached the target, if it did."""

    outcome: MethodRuns
    run: Run
    reached: Reading | None

    @property
    def name(self) -> str:
        return self.outcome.method.name

    @property
    def written(self) -> str:
        """The name with its rate."""
        rate = self.run.tried.get("learning_rate")
        return self.name if rate is None else f"{self.name} at a rate of {rate:g}"


class Recommendation(NamedTuple):
    title: str
    method: str
    reason: str
    code: str


def target_of(comparison: Comparison, given: float | None = None) -> Target | None:
    """The loss that is given, or else the lowest one of the best first-order method, or of any."""
    if given is not None:
        return Target(given, "as given")
    has_progress = lambda run: bool(run.curve) and run.lowest < run.curve[0].loss
    lowest: dict[str, float] = {}
    for each in comparison.outcomes:
        for run in filter(has_progress, each.runs):
            lowest[each.method.kind] = min(run.lowest, lowest.get(each.method.kind, math.inf))
    if "first-order" in lowest:
        return Target(lowest["first-order"], "the lowest loss of the best first-order method")
    return Target(lowest["natural"], "the lowest loss of any method") if lowest else None


def contenders(comparison: Comparison, target: Target | None) -> list[Contender]:
    """The best run of every method that has one: by the time to the target, or else by its loss."""
    reached = lambda run: None if target is None else run.first_at(target.loss)
    each = lambda outcome: [Contender(outcome, run, reached(run)) for run in outcome.runs if math.isfinite(run.lowest)]
    return [min(own, key=_speed) for outcome in comparison.outcomes if (own := each(outcome))]


def verdict(comparison: Comparison, target: Target | None) -> str:
    """In a sentence or two."""
    found = contenders(comparison, target)
    if not found:
        return "No run has a finite loss: nothing can be said."
    if target is None:
        return f"No method lowered the loss of {_text.number(found[0].run.curve[0].loss)} that it starts with."
    natural = [each for each in found if each.outcome.method.kind == "natural"]
    others = [each for each in found if each.outcome.method.kind != "natural"]
    if not others or not natural:
        text = _winner(found)
    else:
        text = " ".join(filter(None, [_duel(natural, min(others, key=_speed), target), _beyond(natural, target)]))
    return " ".join(filter(None, [text, _held_out(found)]))


def _winner(found: list[Contender]) -> str:
    """Among methods of one kind."""
    best = min(found, key=_speed)
    point = best.run.lowest_point
    lowest = f"has the lowest loss, {_text.number(point.loss)} after {point.step:,} steps"
    if best.reached is None or best.reached == point:
        return f"{best.written} {lowest}."
    return f"{best.written} reached a loss of {_text.number(best.reached.loss)} in {_path(best.reached)}."


def _duel(natural: list[Contender], rival: Contender, target: Target) -> str:
    arrived = [each for each in natural if each.reached is not None]
    loss = _text.number(target.loss)
    if rival.reached is None:
        names = ", ".join(each.name for each in arrived) or "No method"
        return f"{names} reached a loss of {loss}; {rival.written}, the best of the first-order methods, did not."
    theirs = rival.reached
    if not arrived:
        closest = min(natural, key=lambda each: each.run.lowest)
        return (
            f"{rival.written} is ahead: it reached a loss of {loss} in {_path(theirs)}, and no natural gradient did; "
            f"{closest.name} came closest with {_text.number(closest.run.lowest)}."
        )
    fast = min(arrived, key=_speed)
    short = min(arrived, key=lambda each: each.reached.step if each.reached else math.inf)
    assert fast.reached is not None and short.reached is not None
    standard = f"the best first-order method, {rival.written},"
    if fast.reached.seconds <= (1 - EQUAL) * theirs.seconds:
        return (
            f"{fast.name} is fastest: it reached a loss of {loss} in {_path(fast.reached)}, for which {standard} took "
            f"{_path(theirs)}: {_ratio(theirs.seconds, fast.reached.seconds)} times the time."
        )
    ours = f"{short.name} reached a loss of {loss} in {_path(short.reached)}"
    if fast.reached.seconds <= (1 + EQUAL) * theirs.seconds:
        return (
            f"A draw in time: {fast.name} took {_path(fast.reached)} to a loss of {loss}, {standard} {_path(theirs)}."
        )
    if short.reached.step < theirs.step:
        return f"In steps {short.name} is ahead, in time {rival.name}: {ours}, {standard} in {_path(theirs)}."
    return f"{rival.written} is ahead: it reached a loss of {loss} in {_path(theirs)}; {ours}."


def _beyond(natural: list[Contender], target: Target) -> str:
    """Who went far below the target."""
    best = min(natural, key=lambda each: each.run.lowest)
    if best.reached is None or not best.run.lowest <= FAR * target.loss or target.loss <= 0:
        return ""
    return f"{best.name} went on to {_text.number(best.run.lowest)}."


def _held_out(found: list[Contender]) -> str:
    """Who is best on data that were not trained on, at whichever point of its run."""
    lows = [
        (loss, point.step, each.written)
        for each in found
        for point in each.run.curve
        if (loss := point.held_out_loss) is not None and math.isfinite(loss)
    ]
    if not lows:
        return ""
    loss, step, name = min(lows)
    return f"On held-out data {name} came lowest on its way, with {_text.number(loss)} after {step:,} steps."


def recommendations(comparison: Comparison, target: Target | None, imported: str) -> list[Recommendation]:
    """The fastest method as code; and the one with the fewest steps, if that is another. `imported` is the code that
    gives `problem`."""
    found = contenders(comparison, target)
    arrived = [each for each in found if each.reached is not None]
    if not arrived:
        lowest = min(found, key=lambda each: each.run.lowest, default=None)
        title = "Lowest loss" if len(found) > 1 else "As code"
        chosen = {} if lowest is None else {title: lowest}
    else:
        fast = min(arrived, key=_speed)
        short = min(arrived, key=lambda each: each.reached.step if each.reached else math.inf)
        chosen = {"Fastest": fast} | ({} if short is fast else {"Fewest steps": short})
    return [_recommended(title, each, imported) for title, each in chosen.items()]


def _recommended(title: str, each: Contender, imported: str) -> Recommendation:
    run, method = each.run, each.outcome.method
    imports = "import jax\n" + ("import natgrad as ng\n" if method.kind == "natural" else "import optax\n")
    steps = each.reached.step if each.reached is not None else run.lowest_point.step
    body = method.code(run.problem, run.tried).replace("{steps}", str(steps)).replace("{seed}", str(run.seed))
    reason = (
        f"{_path(each.reached)} to the target."
        if each.reached is not None
        else f"A loss of {_text.number(run.lowest)} after {run.lowest_point.step:,} steps."
    )
    return Recommendation(title, each.written, reason, f"{imports}\n{imported}\n{body}")


def _speed(each: Contender) -> tuple[float, float]:
    return (math.inf if each.reached is None else each.reached.seconds, each.run.lowest)


def _path(point: Reading) -> str:
    return f"{point.step:,} steps and {_text.duration(point.seconds)}"


def _ratio(more: float, less: float) -> str:
    return f"{more / less:.2g}" if less > 0 else "many"
