"""One run of a method on a problem: compile the step, take steps, measure their time, and record the loss."""

import math
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import PyTree

from natgrad._problem import Problem, Score
from natgrad.experiment.methods import AbstractMethod, Settings, with_warnings


class Reading(NamedTuple):
    """One point of the curve of a run: losses and metrics after some steps and some seconds of stepping."""

    step: int
    seconds: float
    loss: float
    held_out_loss: float | None
    metrics: dict[str, float]


# The name of a thread that compiles, by which the command line finds one that is still running at its end.
COMPILATION = "natgrad compilation"

Scorer = Callable[[PyTree], Score]


class OutOfTime(TimeoutError):
    """A compilation did not end before its deadline. It continues in its thread, which nothing waits for."""


class CompiledMethod(NamedTuple):
    """The compiled step of a method, one program for all of its settings and for all numbers of its optimiser.

    `call` takes the arrays of the optimiser (its numbers), the parameters, the state, the data, the rows of the batch
    and the number of the step. `seconds` is the time of compilation, `state_bytes` the size of the optimiser's state,
    and `note` holds the warnings that the library raised."""

    method: AbstractMethod
    call: Callable
    seconds: float
    state_bytes: int
    note: str

    @classmethod
    def compile(
        cls, method: AbstractMethod, problem: Problem, seed: int, deadline: float = math.inf
    ) -> "CompiledMethod":
        """Compile the step of a method for a problem, and call it once; raise `OutOfTime` at the deadline."""
        start = time.perf_counter()
        state, note = with_warnings(lambda: method.init(problem, method.sweep[0], check=True))

        # Not by `equinox.filter_jit`, which takes the optimiser apart at every call, within the time of the step.
        numbers, others = eqx.partition(method.optimiser(problem), eqx.is_array)

        def advance(numbers, params, state, data, rows, number):
            key = jax.random.fold_in(jax.random.key(seed), number)
            optimiser = eqx.combine(numbers, others)
            return method.step(problem, optimiser, params, state, problem.taken(data, rows), key)

        arguments = numbers, problem.params, state, problem.data, problem.rows(0), np.int32(0)
        call = compile_before(deadline, jax.jit(advance), *arguments)
        # The first call of a program also loads it, which is no part of the time of a step.
        jax.block_until_ready(call(*arguments))
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        return cls(method, call, time.perf_counter() - start, size, note)


def compile_before(deadline: float, function: Any, *arguments: Any) -> Callable:
    """Compile a jitted function for its arguments, and raise `OutOfTime` at the deadline.

    In a thread, since neither a deadline nor Ctrl-C can interrupt XLA."""
    lowered, results = function.lower(*arguments), []

    def work():
        try:
            results.append(lowered.compile())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=work, daemon=True, name=COMPILATION)
    thread.start()
    while thread.is_alive():
        thread.join(timeout=0.1)
        if time.perf_counter() > deadline and thread.is_alive():
            raise OutOfTime("Compilation did not end in time.")
    (result,) = results
    if isinstance(result, Exception):
        raise result
    return result


class Run:
    """A method with one of its settings: numbers and state of the optimiser, parameters, and the curve so far."""

    def __init__(self, program: CompiledMethod, settings: Settings, problem: Problem, seed: int):
        self.program, self.settings, self.problem, self.seed = program, settings, problem, seed
        # Once, since equinox takes 0.05 ms to bind a method of a module.
        self._rows_of_step = problem.rows
        self.numbers = eqx.filter(program.method.optimiser(problem), eqx.is_array)
        self.params, self.state = problem.params, program.method.init(problem, settings)
        self.steps, self.seconds, self.status, self.note = 0, 0.0, "interrupted", ""
        self.curve: list[Reading] = []

    def advance(self) -> Any:
        """Take a step and return its information: the `Info` of a natural-gradient step, or the loss."""
        rows = self._rows_of_step(self.steps, self.seed)
        start = time.perf_counter()
        examples = self.problem.data, rows, np.int32(self.steps)
        params, state, info = self.program.call(self.numbers, self.params, self.state, *examples)
        jax.block_until_ready(params)
        self.seconds += time.perf_counter() - start
        self.params, self.state, self.steps = params, state, self.steps + 1
        return info

    def look(self, score: Scorer) -> Reading:
        """Add a point to the curve. A run whose loss is not finite has diverged and is over."""
        scores = score(self.params)
        held_out = None if scores.held_out_loss is None else float(scores.held_out_loss)
        metrics = {name: float(value) for name, value in scores.metrics.items()}
        point = Reading(self.steps, self.seconds, float(scores.loss), held_out, metrics)
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
        """The point of the curve with the lowest loss."""
        return min((point for point in self.curve if math.isfinite(point.loss)), key=lambda point: point.loss)

    def first_at(self, loss: float) -> Reading | None:
        """The first point of the curve at or below a loss."""
        return next((point for point in self.curve if point.loss <= loss), None)


def sound_scorer(problem: Problem) -> Scorer:
    """The compiled `Problem.score`; raises a `ValueError` if the loss at the initial parameters is not finite."""
    shown, compiled = problem.shown(), jax.jit(problem.score)
    loss = float(compiled(problem.params, shown, problem.held_out).loss)
    if not math.isfinite(loss):
        raise ValueError(
            f"The loss at the initial parameters is {loss}, so no method can lower it. Look for logarithms, divisions "
            "or roots in the model, and for data out of its domain."
        )

    def score(params: PyTree) -> Score:
        return compiled(params, shown, problem.held_out)

    return score
