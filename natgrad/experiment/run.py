"""One method at work on a problem: compiled once, stepped, timed and looked at."""

import math
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

from natgrad._problem import Problem, Score
from natgrad.experiment.methods import AbstractMethod, Settings, with_warnings


class Reading(NamedTuple):
    """Where a run was: after how many steps and seconds of stepping, and how good."""

    step: int
    seconds: float
    loss: float
    held_out_loss: float | None
    metrics: dict[str, float]


# The name of a thread that compiles.
COMPILATION = "natgrad compilation"

Scorer = Callable[[PyTree], Score]


class OutOfTime(TimeoutError):
    """A compilation did not end before its deadline. It goes on in its thread."""


class CompiledMethod(NamedTuple):
    """The compiled step of a method, the same for all its settings; the seconds that took; the size of its state in
    bytes; and what the library warned of."""

    method: AbstractMethod
    call: Callable
    seconds: float
    state_bytes: int
    note: str

    @classmethod
    def compiled(
        cls, method: AbstractMethod, problem: Problem, seed: int, deadline: float = math.inf
    ) -> "CompiledMethod":
        start = time.perf_counter()
        state, note = with_warnings(lambda: method.init(problem, method.sweep[0], check=True))

        def advance(params, state, data, rows, number):
            key = jax.random.fold_in(jax.random.key(seed), number)
            return method.step(problem, params, state, problem.taken(data, rows), key)

        arguments = problem.params, state, problem.data, problem.rows(0), np.int32(0)
        call = compiled_by(deadline, jax.jit(advance), *arguments)
        # What a program does once only, at its first call, is no part of a step.
        jax.block_until_ready(call(*arguments))
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        return cls(method, call, time.perf_counter() - start, size, note)


def compiled_by(deadline: float, function: Any, *arguments: Any) -> Callable:
    """A jitted function compiled for its arguments. In a thread, since a compilation cannot be interrupted."""
    lowered, found = function.lower(*arguments), []

    def work():
        try:
            found.append(lowered.compile())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=work, daemon=True, name=COMPILATION)
    thread.start()
    while thread.is_alive():
        thread.join(timeout=0.1)
        if time.perf_counter() > deadline and thread.is_alive():
            raise OutOfTime("Its compilation did not end in time.")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]


class Run:
    """A method with one of its settings, under way."""

    def __init__(self, program: CompiledMethod, tried: Settings, problem: Problem, seed: int):
        self.program, self.tried, self.problem, self.seed = program, tried, problem, seed
        self.params, self.state = problem.params, program.method.init(problem, tried)
        self.steps, self.seconds, self.status, self.note = 0, 0.0, "interrupted", ""
        self.curve: list[Reading] = []

    def advance(self) -> Any:
        """Take a step and return what it says of itself."""
        rows = self.problem.rows(self.steps, self.seed)
        start = time.perf_counter()
        params, state, info = self.program.call(self.params, self.state, self.problem.data, rows, np.int32(self.steps))
        jax.block_until_ready(params)
        self.seconds += time.perf_counter() - start
        self.params, self.state, self.steps = params, state, self.steps + 1
        return info

    def look(self, score: Scorer) -> Reading:
        """Add a point to the curve. A run whose loss is not finite any more is over."""
        found = score(self.params)
        held_out = None if found.held_out_loss is None else float(found.held_out_loss)
        metrics = {name: float(value) for name, value in found.metrics.items()}
        point = Reading(self.steps, self.seconds, float(found.loss), held_out, metrics)
        self.curve.append(point)
        if not math.isfinite(point.loss):
            self.status = "diverged"
        return point

    @property
    def is_over(self) -> bool:
        return self.status != "interrupted"

    @property
    def lowest(self) -> float:
        """The lowest loss so far; infinite if there was none, or if the run diverged."""
        if self.status == "diverged":
            return math.inf
        return min((point.loss for point in self.curve if math.isfinite(point.loss)), default=math.inf)

    @property
    def lowest_point(self) -> Reading:
        """Where the loss was lowest."""
        return min((point for point in self.curve if math.isfinite(point.loss)), key=lambda point: point.loss)

    def first_at(self, loss: float) -> Reading | None:
        """The first point of the curve at or below a loss."""
        return next((point for point in self.curve if point.loss <= loss), None)


def sound_scorer(problem: Problem) -> Scorer:
    """How good parameters are, compiled, for a problem whose initial parameters have a finite loss."""
    shown, compiled = problem.shown(), jax.jit(problem.score)
    loss = float(compiled(problem.params, shown, problem.held_out).loss)
    if not math.isfinite(loss):
        raise ValueError(
            f"The loss at the initial parameters is {loss}, so that there is nothing to follow downhill. Look for "
            "logarithms, divisions or roots in the model, and for data out of its domain."
        )
    return lambda params: compiled(params, shown, problem.held_out)
