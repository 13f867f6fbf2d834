"""The problem that the command line names: a ready-made one, the user's own, or one made from a data file."""

import difflib
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax

from natgrad._problem import Problem
from natgrad.cli.failure import Failure
from natgrad.problems import PROBLEMS, from_file

DATA = (".csv", ".csv.gz", ".npz", "-ubyte", "-ubyte.gz")


class TableOptions(NamedTuple):
    """What a data file needs besides its name."""

    target: str | None = None
    hidden: str = "64,64"
    ignore: tuple[str, ...] = ()
    task: str | None = None
    batch_size: int | None = None

    def settings(self) -> dict[str, Any]:
        """Those that were given, for the record of a run."""
        given = {name: value for name, value in self._asdict().items() if value != self._field_defaults[name]}
        return given | ({"ignore": list(self.ignore)} if self.ignore else {})


class Loaded(NamedTuple):
    """A problem, and the code that gives it."""

    problem: Problem
    code: str


def load(name: str, seed: int, table: TableOptions) -> Loaded:
    if name in PROBLEMS:
        return _embedded(name, seed)
    path, _, attribute = name.partition(":") if ".py" in name else (name, "", "")
    if path.endswith(".py"):
        return _own(Path(path), attribute or "problem", seed)
    if path.endswith(DATA):
        return _table(Path(path), seed, table)
    close = difflib.get_close_matches(name, PROBLEMS, 1)
    raise Failure(
        f"There is no problem `{name}`."
        + (f" Did you mean `{close[0]}`?" if close else "")
        + f" Choose from {', '.join(PROBLEMS)}; or give `file.py:name`, or a data file ({', '.join(DATA[:3])} or IDX)."
    )


def _embedded(name: str, seed: int) -> Loaded:
    if PROBLEMS[name].is_double:
        jax.config.update("jax_enable_x64", True)
    function = name.replace("-", "_")
    double = 'jax.config.update("jax_enable_x64", True)\n' if PROBLEMS[name].is_double else ""
    code = f"from natgrad.problems import {function}\n\n{double}problem = {function}(seed={seed})\n"
    return Loaded(PROBLEMS[name].make(seed), code)


def _own(path: Path, attribute: str, seed: int) -> Loaded:
    if not path.is_file():
        raise Failure(f"There is no file `{path}`. `natgrad new {path}` writes one to start from.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    if not hasattr(module, attribute):
        found = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise Failure(f"`{path}` has no `{attribute}`. It has {', '.join(found) or 'no functions'}.")
    made, call = getattr(module, attribute), attribute
    if not isinstance(made, Problem) and callable(made):
        is_seeded = "seed" in inspect.signature(made).parameters
        made = made(seed=seed) if is_seeded else made()
        call = f"{attribute}(seed={seed})" if is_seeded else f"{attribute}()"
    if not isinstance(made, Problem):
        raise Failure(
            f"`{path}:{attribute}` gave `{type(made).__name__}`, but the command line needs `ng.Problem(model, "
            "objective, params, data)`. `natgrad new` writes one to start from."
        )
    return Loaded(made, f"from {path.stem} import {attribute}\n\nproblem = {call}\n")


def _table(path: Path, seed: int, table: TableOptions) -> Loaded:
    options: dict[str, Any] = {
        "target": table.target,
        "hidden": _widths(table.hidden),
        "seed": seed,
        "task": table.task,
        "ignore": table.ignore,
        "batch_size": table.batch_size,
    }
    problem = from_file(path, **options)
    written = ", ".join(f"{name}={value!r}" for name, value in options.items() if value not in (None, ()))
    imports = "from pathlib import Path\n\nfrom natgrad.problems import from_file\n\n"
    return Loaded(problem, f'{imports}problem = from_file(Path("{path}"), {written})\n')


def _widths(text: str) -> tuple[int, ...]:
    try:
        widths = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        widths = (0,)
    if any(width < 1 for width in widths):
        raise Failure(f"`--hidden` needs widths of layers such as `64,64`, but got `{text}`.")
    return widths
