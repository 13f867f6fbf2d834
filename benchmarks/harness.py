"""Compile programs, time them against each other, and read off what XLA counts.

Repeats are interleaved, so that a passing disturbance falls on all programs alike, and a ratio is that of two medians
from one run. This steadies ratios but does not make them independent of load, so the load is printed with each table.
Floating-point operations and bytes are those XLA states for the compiled program, and do not depend on it.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

# One timing covers as many calls as fill this many seconds.
WINDOW = 2e-3
REPEATS = 25


class Program(NamedTuple):
    """A function to be compiled, and the arguments it is measured on."""

    function: Callable
    arguments: tuple[Any, ...]


class Cost(NamedTuple):
    """What one call of a compiled program costs: median seconds with their quartiles, and XLA's counts."""

    seconds: float
    quartiles: tuple[float, float]
    flops: float
    bytes_accessed: float
    temporary_bytes: int
    compile_seconds: float


class Table(NamedTuple):
    """The result of one benchmark: rows of a Markdown table, and remarks below it."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    remarks: Sequence[str] = ()


def measure(programs: dict[str, Program], repeats: int = REPEATS) -> dict[str, Cost]:
    """The cost of each program, with their repeats interleaved."""
    compiled = {name: compile_timed(program) for name, program in programs.items()}
    runs = {name: (executable, programs[name].arguments) for name, (executable, _) in compiled.items()}
    times = interleaved_times(runs, repeats)
    return {
        name: Cost(*median_and_quartiles(times[name]), *counts(executable), spent)
        for name, (executable, spent) in compiled.items()
    }


def compile_timed(program: Program) -> tuple[Any, float]:
    """The compiled program, and how long tracing and compiling took."""
    start = time.perf_counter()
    executable = jax.jit(program.function).lower(*program.arguments).compile()
    return executable, time.perf_counter() - start


def counts(executable: Any) -> tuple[float, float, int]:
    """Floating-point operations (exponentials and the like not among them), bytes read and written, and bytes of
    temporary memory."""
    cost, memory = executable.cost_analysis(), executable.memory_analysis()
    return cost.get("flops", 0.0), cost.get("bytes accessed", 0.0), memory.temp_size_in_bytes


def interleaved_times(runs: dict[str, tuple[Callable, tuple]], repeats: int) -> dict[str, list[float]]:
    """Seconds a call, where every repeat times each program once before any is timed again."""
    calls = {name: max(1, round(WINDOW / time_calls(*run, number=3))) for name, run in runs.items()}
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            times[name].append(time_calls(*run, number=calls[name]))
    return times


def median_and_quartiles(times: Sequence[float]) -> tuple[float, tuple[float, float]]:
    lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
    return median, (lower, upper)


def time_calls(executable: Callable, arguments: tuple, number: int) -> float:
    """Seconds a call, over `number` calls in a row after one that warms up."""
    jax.block_until_ready(executable(*arguments))
    start = time.perf_counter()
    jax.block_until_ready([executable(*arguments) for _ in range(number)])
    return (time.perf_counter() - start) / number


def slope(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """The exponent of the power law fitted to costs against sizes: 1 is linear, 2 quadratic."""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


def markdown(table: Table) -> str:
    """The table in Markdown: names to the left, figures to the right."""
    rules = ["---", *["---:"] * (len(table.columns) - 1)]
    lines = ["| " + " | ".join(cells) + " |" for cells in (table.columns, rules, *table.rows)]
    return "\n\n".join(["\n".join(lines), *table.remarks])


def quantity(value: float, unit: str) -> str:
    """A number with three digits and a prefix to its unit."""
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ")):
        if value >= factor:
            return f"{value / factor:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"
