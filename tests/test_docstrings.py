"""Docstrings: every public class and function has an example, and every example runs as users would run it."""

import inspect
import re
import textwrap
import types
from collections.abc import Iterator

import pytest

import natgrad as ng
from natgrad import experiment, problems, testing

BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
# Examples that need a file of the user's.
NOT_RUN = {"problems.from_file"}


def members(name: str, value: object) -> Iterator[tuple[str, object]]:
    """A public object with a docstring of its own, and the public methods of a class."""
    yield name, value
    if inspect.isclass(value):
        for key, member in vars(value).items():
            if not key.startswith("_") and callable(getattr(value, key)):
                yield f"{name}.{key}", member


def public() -> dict[str, object]:
    names = {name: value for name, value in vars(ng).items() if not name.startswith("_")}
    return {
        name: value
        for name, value in names.items()
        if not isinstance(value, types.ModuleType) and value.__module__.startswith("natgrad")
    }


def docstring(value: object) -> str:
    """The docstring of an object itself, not one that it inherits."""
    own = vars(value).get("__doc__") if inspect.isclass(value) else value.__doc__
    return inspect.cleandoc(own or "")


def examples() -> dict[str, str]:
    """The code blocks in the docstrings of public objects, by name and number."""
    rooms = {f"{room.__name__.removeprefix('natgrad.')}.": room for room in (problems, testing, experiment)}
    objects = public()
    for prefix, room in rooms.items():
        objects |= {prefix + name: value for name, value in vars(room).items() if inspect.isfunction(value)}
    return {
        f"{member}-{number}" if number else member: code
        for name, value in objects.items()
        for member, owner in members(name, value)
        for number, code in enumerate(BLOCK.findall(docstring(owner)))
    }


EXAMPLES = examples()


def test_every_public_name_has_an_example():
    missing = public().keys() - EXAMPLES.keys()
    assert not missing, f"no example in the docstrings of {sorted(missing)}: add one between ```python and ```"


def test_first_lines_stand_alone():
    lines = {name: docstring(value).splitlines() for name, value in public().items()}
    long = [name for name, (first, *rest) in lines.items() if not first or (rest and rest[0])]
    assert not long, f"first paragraphs of more than a line: {sorted(long)}"


@pytest.mark.float32
@pytest.mark.sample(60)
@pytest.mark.users_defaults
@pytest.mark.parametrize("name", sorted(EXAMPLES.keys() - NOT_RUN))
def test_examples_run(name):
    exec(compile(textwrap.dedent(EXAMPLES[name]), f"<example of {name}>", "exec"), {})
