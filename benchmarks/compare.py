"""`natgrad compare` as a user starts it: how long it takes, and what it finds.

Each row is one process, from start to exit, with the ready-made problem's own number of steps or a budget of seconds.
"In all" is by the clock outside, imports and the writing of the report included; compilation is that of the methods;
"over" is how much longer than its budget of seconds the whole took (a report is promised within 20 s of it). Peak
memory is that of the process. The last columns are the verdict in numbers: the loss that the best first-order method
reaches with the best of its swept rates, the steps and seconds it takes, and those of the natural gradient that is
fastest to the same loss. One run each, not repeated: seconds of a few milliseconds a step differ by some ten per cent
from run to run, and steps do not."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from harness import Table, quantity

CASES = (
    ("digits",),
    ("digits", "--seconds", "30"),
    ("digits-autoencoder",),
    ("diabetes",),
    ("rosenbrock",),
    ("poisson-pde",),
)


class Measured(NamedTuple):
    """A report, and what it cost to get."""

    report: dict[str, Any]
    seconds: float
    peak_bytes: int
    page_bytes: int


def run(advance: Callable[[float], None]) -> Table:
    rows = []
    for case in CASES:
        rows.append(row(case, measured(case)))
        advance(1 / len(CASES))
    columns = ("problem", "in all", "over", "compilation", "peak memory", "page", "loss", "first-order", "natural")
    return Table(columns, rows)


def measured(case: tuple[str, ...]) -> Measured:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "natgrad", "compare", *case, "--out", folder, "--quiet"]
        start = time.perf_counter()
        process = subprocess.Popen(command)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"`natgrad compare {' '.join(case)}` ended with exit code {process.returncode}.")
        report = json.loads((Path(folder) / "report.json").read_text())
        return Measured(report, seconds, 1024 * usage.ru_maxrss, (Path(folder) / "report.html").stat().st_size)


def row(case: tuple[str, ...], found: Measured) -> tuple[str, ...]:
    report = found.report
    budget = report["settings"]["seconds"]
    return (
        " ".join(case),
        quantity(found.seconds, "s"),
        "-" if budget is None else quantity(found.seconds - budget, "s"),
        quantity(report["seconds"]["compilation"], "s"),
        quantity(found.peak_bytes, "B"),
        quantity(found.page_bytes, "B"),
        f"{report['target']['loss']:.3g}",
        fastest(report, "first-order"),
        fastest(report, "natural"),
    )


def fastest(report: dict[str, Any], kind: str) -> str:
    arrived = [each for each in report["methods"] if each["kind"] == kind and each["seconds_to_target"] is not None]
    if not arrived:
        return "none"
    best = min(arrived, key=lambda each: each["seconds_to_target"])
    return f"{best['name']}: {best['steps_to_target']}, {quantity(best['seconds_to_target'], 's')}"
