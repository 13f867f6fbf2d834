"""Numbers for the parameters at or below paths."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from natgrad._check import as_number, check_number, is_concrete
from natgrad._tree import check_paths, option_for


class LeafNumbers(NamedTuple):
    """A number for every leaf of the parameters, `numbers[indices[leaf]]`. Number 0 is the default, which is known
    while a step is traced; leaves of one index have the same number."""

    numbers: tuple[Any, ...]
    indices: tuple[int, ...]

    def at(self, leaf: int) -> Any:
        return self.numbers[self.indices[leaf]]

    @property
    def is_uniform(self) -> bool:
        """Whether all leaves have the same number."""
        return len(set(self.indices)) <= 1

    @property
    def is_default(self) -> bool:
        return not any(self.indices)


class NumberByPath(eqx.Module):
    """A default and other numbers (or schedules) for the parameters at or below paths. Which paths share a number is
    part of the program; the numbers are not."""

    numbers: tuple[Any, ...]
    default: float = eqx.field(static=True)
    # Paths with the index of their number, where 0 is the default.
    paths: tuple[tuple[str, int], ...] = eqx.field(static=True)

    def __init__(self, value: Any, default: float):
        given = value if isinstance(value, Mapping) else {} if value is None else {"": value}
        numbers, paths = [default], []
        for path, number in given.items():
            known = [index for index, other in enumerate(numbers) if _is_same(number, other)]
            index = known[0] if known else len(numbers)
            numbers += [] if known else [number]
            paths.append((str(path), index))
        self.numbers, self.default = tuple(map(as_number, numbers[1:])), default
        self.paths = tuple(paths)

    @property
    def is_default(self) -> bool:
        """Whether the default is all there is."""
        return not any(index for _, index in self.paths)

    def check(self, name: str, **bounds: Any) -> None:
        """Refuse numbers out of bounds."""
        for path, index in self.paths:
            check_number((self.default, *self.numbers)[index], f"`{name}[{path!r}]`" if path else f"`{name}`", **bounds)

    def of_leaves(self, names: Sequence[str], argument: str) -> LeafNumbers:
        """The numbers of parameters with some names."""
        options = dict(self.paths)
        check_paths(options, names, argument)
        return LeafNumbers((self.default, *self.numbers), tuple(option_for(options, name) or 0 for name in names))


def by_path(default: float) -> Callable[[Any], NumberByPath]:
    """A converter from one number for all, or a mapping from paths to numbers."""
    return lambda value: value if isinstance(value, NumberByPath) else NumberByPath(value, default)


def spread(numbers: Sequence[Any], sizes: Sequence[int]) -> Float[Array, " P"]:
    """The number of every leaf at each of its entries."""
    parts = zip(numbers, sizes, strict=True)
    return jnp.concatenate([jnp.full(size, jnp.asarray(number, float)) for number, size in parts])


def _is_same(number: Any, other: Any) -> bool:
    if number is other or callable(number) or callable(other):
        return number is other
    return is_concrete((number, other)) and np.ndim(number) == np.ndim(other) == 0 and bool(number == other)
