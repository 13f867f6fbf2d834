"""Run the benchmarks and write their tables into RESULTS.md: all of them, or those named on the command line.

Each benchmark is a module here with a docstring that says what is measured, and a function `run(advance)` that returns
one `harness.Table` and calls `advance(fraction)` as it proceeds. Add its name to `BENCHMARKS`.
"""

import importlib
import os
import platform
import re
import sys
from pathlib import Path

import jax
from harness import Table, markdown
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

BENCHMARKS = (
    "categorical",
    "products",
    "per_example",
    "point",
    "sample_space",
    "kronecker",
    "untuned",
    "autoencoder",
    "proximal",
    "streams",
    "compare",
)
RESULTS = Path(__file__).parent / "RESULTS.md"

INTRODUCTION = """\
# Measured costs

Written by `make bench`. Times are medians of interleaved repeats. They depend on the machine and on its load, which
is given above each table, and so do their ratios. Flops and bytes are XLA's own counts for the
compiled program, exponentials and the like not included, and depend on neither. Compilation starts from an empty cache.
"""


def main(names: list[str]) -> None:
    if unknown := set(names) - set(BENCHMARKS):
        sys.exit(f"There is no benchmark named {', '.join(sorted(unknown))}. Choose from {', '.join(BENCHMARKS)}.")
    columns = TextColumn("{task.description:>14}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns) as progress:
        tasks = {name: progress.add_task(name, total=1.0, start=False) for name in names or BENCHMARKS}
        sections = previous_sections()
        for name, task in tasks.items():
            progress.start_task(task)
            module = importlib.import_module(name)
            load = os.getloadavg()[0]
            table = module.run(lambda fraction, task=task: progress.advance(task, fraction))
            sections[name] = section(name, module.__doc__ or "", table, load)
            write(sections)
    print(f"The tables are in {os.path.relpath(RESULTS)}.")


def section(name: str, docstring: str, table: Table, load: float) -> str:
    title, _, description = docstring.strip().partition("\n\n")
    heading = f"## {name.replace('_', ' ').capitalize()}"
    return "\n\n".join([heading, title, description, machine(load), markdown(table)]) + "\n"


def machine(load: float) -> str:
    devices = {device.platform for device in jax.devices()}
    return (
        f"Machine: {platform.machine()} with {os.cpu_count()} cores, JAX {jax.__version__} on {', '.join(devices)}, "
        f"Python {platform.python_version()}, load average {load:.1f} before the run."
    )


def previous_sections() -> dict[str, str]:
    """Tables of earlier runs, so that one benchmark can be repeated alone."""
    text = RESULTS.read_text() if RESULTS.exists() else ""
    return dict(re.findall(r"<!-- (\w+) -->\n(.*?)<!-- end -->", text, re.DOTALL))


def write(sections: dict[str, str]) -> None:
    parts = [f"<!-- {name} -->\n{sections[name]}<!-- end -->\n" for name in BENCHMARKS if name in sections]
    RESULTS.write_text("\n".join([INTRODUCTION, *parts]))


if __name__ == "__main__":
    main(sys.argv[1:])
