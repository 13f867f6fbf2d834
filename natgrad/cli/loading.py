"""Load the problem named on the command line: a ready-made one, a function in the user's file, or a data file."""

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
    """The options that apply to data files only."""

    target: str | None = None
    hidden: str = "64,64"
    ignore: tuple[str, ...] = ()
    task: str | None = None
    batch_size: int | None = None

    def refuse(self) -> None:
        """Refuse options that a problem which is no data file would ignore."""
        ignored = [name for name, value in self._asdict().items() if value != self._field_defaults[name]]
        if ignored:
            option = f"--{ignored[0].replace('_', '-')}"
            raise Failure(f"`{option}` is for data files ({', '.join(DATA[:3])} or IDX). Leave it out here.")


class Loaded(NamedTuple):
    """A problem, and the code that defines it as `problem`."""

    problem: Problem
    code: str


def load(name: str, seed: int, table: TableOptions) -> Loaded:
    """The problem called `name`: of `PROBLEMS`, `file.py:function`, or a data file."""
    if name in PROBLEMS:
        table.refuse()
        return _ready_made(name, seed)
    path, _, attribute = name.rpartition(":") if ".py:" in name else (name, "", "problem")
    if path.endswith(".py"):
        table.refuse()
        return _from_module(Path(path), attribute, seed)
    if path.endswith(DATA):
        return _from_data(Path(path), seed, table)
    close = difflib.get_close_matches(name, PROBLEMS, 1)
    raise Failure(
        f"There is no problem `{name}`."
        + (f" Did you mean `{close[0]}`?" if close else "")
        + f" Choose from {', '.join(PROBLEMS)}; or give `file.py:name`, or a data file ({', '.join(DATA[:3])} or IDX)."
    )


def _ready_made(name: str, seed: int) -> Loaded:
    if PROBLEMS[name].is_double:
        jax.config.update("jax_enable_x64", True)
    function = name.replace("-", "_")
    double = 'jax.config.update("jax_enable_x64", True)\n' if PROBLEMS[name].is_double else ""
    code = f"from natgrad.problems import {function}\n\n{double}problem = {function}(seed={seed})\n"
    return Loaded(PROBLEMS[name].make(seed), code)


def _from_module(path: Path, attribute: str, seed: int) -> Loaded:
    """Run the user's file, and call the function `attribute` in it unless that is a `Problem` already."""
    if not path.is_file():
        raise Failure(f"There is no file `{path}`. Write one to start from with `natgrad new {path}`.")
    # Last on the path and under a name with a prefix, so that a file called `types.py` hides no module of Python.
    sys.path.append(str(path.parent.resolve()))
    name = f"_natgrad_problem_{path.stem}"
    module = sys.modules[name] = types.ModuleType(name)
    module.__file__ = str(path)
    # Not imported: the import cache may hold an older version of the file.
    exec(compile(path.read_bytes(), path, "exec"), vars(module))
    if not hasattr(module, attribute):
        members = vars(module).items()
        functions = [key for key, value in members if inspect.isfunction(value) and not key.startswith("_")]
        raise Failure(f"`{path}` has no `{attribute}`. It has {', '.join(functions) or 'no functions'}.")
    value, code = getattr(module, attribute), f"runpy.run_path({str(path)!r})[{attribute!r}]"
    if not isinstance(value, Problem) and callable(value):
        arguments = _arguments(value, f"`{path}:{attribute}`", seed)
        value = value(**arguments)
        code += f"({', '.join(f'{key}={number}' for key, number in arguments.items())})"
    if not isinstance(value, Problem):
        raise Failure(
            f"`{path}:{attribute}` gave `{type(value).__name__}`, but the command line needs `ng.Problem(model, "
            "objective, params, data)`. Write a file to start from with `natgrad new`."
        )
    return Loaded(value, f"import runpy\n\nproblem = {code}\n")


def _arguments(function: Callable, name: str, seed: int) -> dict[str, int]:
    """The arguments to call a problem's function with: a seed, if it takes one."""
    parameters = inspect.signature(function).parameters
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        key
        for key, parameter in parameters.items()
        if parameter.default is parameter.empty and parameter.kind not in variadic and key != "seed"
    ]
    if needed:
        raise Failure(
            f"{name} needs the arguments {', '.join(needed)}, but the command line passes only `seed`. Give them "
            "defaults, or write a function without arguments that calls it."
        )
    return {"seed": seed} if "seed" in parameters else {}


def _from_data(path: Path, seed: int, table: TableOptions) -> Loaded:
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
        raise Failure(
            f"`--hidden` needs the widths of the hidden layers, but got `{text}`. Write for example `--hidden 64,64`."
        )
    return widths
