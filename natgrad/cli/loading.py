"""The problem that the command line names: a ready-made one, the user's own, or one made from a data file."""

import difflib
import inspect
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from natgrad._problem import Problem
from natgrad.cli.ending import Failure
from natgrad.problems import PROBLEMS, from_file

DATA = (".csv", ".csv.gz", ".npz", "-ubyte", "-ubyte.gz")


class TableOptions(NamedTuple):
    """What a data file needs besides its name."""

    target: str | None = None
    hidden: str = "64,64"
    ignore: tuple[str, ...] = ()
    task: str | None = None
    batch_size: int | None = None

    def refuse(self) -> None:
        """Refuse options that would be ignored, since the problem is no data file."""
        given = [name for name, value in self._asdict().items() if value != self._field_defaults[name]]
        if given:
            option = f"--{given[0].replace('_', '-')}"
            raise Failure(f"`{option}` is for data files ({', '.join(DATA[:3])} or IDX). Leave it out here.")


class Loaded(NamedTuple):
    """A problem, and the code that gives it."""

    problem: Problem
    code: str


def load(name: str, seed: int, table: TableOptions) -> Loaded:
    if name in PROBLEMS:
        table.refuse()
        return _embedded(name, seed)
    path, _, attribute = name.rpartition(":") if ".py:" in name else (name, "", "problem")
    if path.endswith(".py"):
        table.refuse()
        return _own(Path(path), attribute, seed)
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
    # Last, and by a name of its own, so that a file called `types.py` hides nothing.
    sys.path.append(str(path.parent.resolve()))
    name = f"_natgrad_problem_{path.stem}"
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = str(path)
    # Not by an import, whose cache may hold an older version of the file.
    exec(compile(path.read_bytes(), path, "exec"), vars(module))
    if not hasattr(module, attribute):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise Failure(f"`{path}` has no `{attribute}`. It has {', '.join(found) or 'no functions'}.")
    made, code = getattr(module, attribute), f"runpy.run_path({str(path)!r})[{attribute!r}]"
    if not isinstance(made, Problem) and callable(made):
        arguments = _arguments(made, f"`{path}:{attribute}`", seed)
        made = made(**arguments)
        code += f"({', '.join(f'{key}={value}' for key, value in arguments.items())})"
    if not isinstance(made, Problem):
        raise Failure(
            f"`{path}:{attribute}` gave `{type(made).__name__}`, but the command line needs `ng.Problem(model, "
            "objective, params, data)`. `natgrad new` writes one to start from."
        )
    return Loaded(made, f"import runpy\n\nproblem = {code}\n")


def _arguments(made: Callable, name: str, seed: int) -> dict[str, int]:
    """What to call a problem's function with: a seed, if it takes one."""
    parameters = inspect.signature(made).parameters
    given = {"seed": seed} if "seed" in parameters else {}
    named = [each for each in parameters.values() if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    needed = [each.name for each in named if each.default is each.empty and each.name not in given]
    if needed:
        raise Failure(f"{name} needs the arguments {', '.join(needed)}, but can only be given `seed`.")
    return given


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
    return Loaded(problem, f"{imports}problem = from_file(Path({str(path)!r}), {written})\n")


def _widths(text: str) -> tuple[int, ...]:
    try:
        widths = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        widths = (0,)
    if any(width < 1 for width in widths):
        raise Failure(f"`--hidden` needs widths of layers such as `64,64`, but got `{text}`.")
    return widths
