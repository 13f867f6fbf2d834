"""Options by the paths of parameters: a key is for the parameter of that name, or for all below it."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from natgrad._check import caller, check_number

Option = TypeVar("Option")


def numbers_by_path(value: Any, name: str, *, schedules: bool = False) -> dict[str, Any]:
    """Numbers of at least zero for the parameters at or below paths, from one for all or from a mapping."""
    given = {str(path): own for path, own in value.items()} if isinstance(value, Mapping) else {"": value}
    for path, own in given.items():
        where = f"`{name}[{path!r}]`" if isinstance(value, Mapping) else f"`{name}`"
        check_number(own, where, least=0, schedules=schedules)
    return given


def option_for(options: Mapping[str, Option], name: str) -> Option | None:
    """The option with the longest key that fits."""
    keys = [key for key in options if fits(key, name)]
    return options[max(keys, key=len)] if keys else None


def fits(key: str, name: str) -> bool:
    return key in ("", name) or (name.startswith(key) and name[len(key)] in "[.")


def check_paths(keys: Iterable[str], names: Iterable[str], argument: str) -> None:
    """Refuse keys that fit no parameter."""
    names = list(names)
    for key in keys:
        if not any(fits(key, name) for name in names):
            raise ValueError(
                f"{caller()}: there is no parameter at `{key}`, which is a path in `{argument}`. The paths are "
                f"{', '.join(names)}."
            )
