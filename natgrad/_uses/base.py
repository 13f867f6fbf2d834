"""One use of a parameter at one site, and the local derivative of a site.

Values are arrays for one example, with the axes of loops in front: `loops ... shape ...`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from natgrad._program.plan import Site
from natgrad._program.values import Dependent, Free, over_loops


@dataclass(frozen=True, eq=False)
class Use:
    """A free value that carries a gradient, as one operand of a site. `operand` is its position there."""

    site: Site
    operand: int

    @property
    def value(self) -> Free:
        value = self.site.operands[self.operand]
        assert isinstance(value, Free)
        return value

    @property
    def loop_axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of the loops of the site, in two tuples: loops over which the value changes, so that each step has
        its own weight; and loops whose steps share one weight."""
        changes = [loop in self.value.loops for loop in self.site.loops]
        groups = tuple(axis for axis, is_changing in enumerate(changes) if is_changing)
        shared = tuple(axis for axis, is_changing in enumerate(changes) if not is_changing)
        return groups, shared


def local(site: Site, changing: tuple[int, ...], free: dict[Free, Any], lengths: dict[int, int]) -> Callable:
    """The equation of a site for one example, at all steps of its loops: `function(operands, records) -> results`.

    It is a function of the operands at the positions `changing` and of the recorded values; `free` has the others."""
    fixed = [k for k in range(len(site.operands)) if k not in changing]
    order = [*changing, *fixed]

    def step(*operands: Any) -> tuple[Any, ...]:
        placed = dict(zip(order, operands, strict=True))
        results = site.compute([placed[k] for k in range(len(order))])
        return tuple(results[k] for k in site.results)

    steps = over_loops(step, [site.operands[k].loops for k in order], site.loops, lengths)

    def function(operands: list[Any], records: list[Any]) -> tuple[Any, ...]:
        known = {**free, **dict(zip(site.recorded, records, strict=True))}
        return steps(*operands, *(_value_of(site.operands[k], known, lengths) for k in fixed))

    return function


def local_vjp(site: Site, function: Callable, operands: list[Any], records: list[Any]) -> tuple[Any, Callable]:
    """The results of `local`, and the map from their cotangents to cotangents of the `operands`.

    Where a derivative may depend on what is perturbed, records that change with the parameters are differentiated too,
    as they are in the model."""
    perturbed = [k for k, value in enumerate(site.recorded) if value.is_perturbed and site.asks_what_is_perturbed]

    def with_perturbed(operands: list[Any], perturbed_records: list[Any]) -> tuple[Any, ...]:
        changed = dict(zip(perturbed, perturbed_records, strict=True))
        return function(operands, [changed.get(k, record) for k, record in enumerate(records)])

    results, pull = jax.vjp(with_perturbed, operands, [records[k] for k in perturbed])
    return results, lambda cotangents: pull(cotangents)[0]


def _value_of(value: Any, known: dict, lengths: dict[int, int]) -> Any:
    """The array of an operand; zeros if it was not recorded, because the derivative does not depend on it then."""
    if value in known or isinstance(value, Free):
        return known[value]
    assert isinstance(value, Dependent)
    return jnp.zeros((*(lengths[loop] for loop in value.loops), *value.aval.shape), value.aval.dtype)


def spread(x: Any, value_loops: tuple[int, ...], loops: tuple[int, ...], lengths: dict[int, int]) -> Any:
    """Repeat an array that has the axes of `value_loops` in front along the others of `loops`."""
    shape = x.shape[len(value_loops) :]
    aligned = x.reshape((*(lengths[loop] if loop in value_loops else 1 for loop in loops), *shape))
    return namespace_of(x).broadcast_to(aligned, (*(lengths[loop] for loop in loops), *shape))


def namespace_of(x: Any) -> Any:
    """NumPy for NumPy arrays, which are then not traced and compile nothing (as in `compat.rearrange`); else
    `jax.numpy`."""
    return np if isinstance(x, np.ndarray) else jnp
