"""One use of a parameter at one site, and the local derivative of a site."""

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
    """A free value at its place among the operands of a site."""

    site: Site
    operand: int

    @property
    def value(self) -> Free:
        value = self.site.operands[self.operand]
        assert isinstance(value, Free)
        return value

    @property
    def loop_axes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The axes of the site's loops in front of its operands: first of those the value changes over, so that each
        step has a weight of its own; then of those in which all steps share it."""
        axes = range(len(self.site.loops))
        changes = [loop in self.value.loops for loop in self.site.loops]
        return tuple(k for k in axes if changes[k]), tuple(k for k in axes if not changes[k])


def local(site: Site, changing: tuple[int, ...], free: dict[Free, Any], lengths: dict[int, int]) -> Callable:
    """The equation of a site for one example, at all steps of its loops, as a function of the operands at `changing`
    and of what was recorded: `function(operands, records) -> results`."""
    fixed = [k for k in range(len(site.operands)) if k not in changing]
    order = [*changing, *fixed]

    def step(*operands: Any) -> tuple[Any, ...]:
        placed = dict(zip(order, operands, strict=True))
        results = site.compute([placed[k] for k in range(len(order))])
        return tuple(results[k] for k in site.results)

    steps = over_loops(step, [site.operands[k].loops for k in order], site.loops, lengths)

    def function(operands: list[Any], records: list[Any]) -> tuple[Any, ...]:
        known = {**free, **dict(zip(site.recorded, records, strict=True))}
        return steps(*operands, *(_known(site.operands[k], known, lengths) for k in fixed))

    return function


def local_vjp(site: Site, function: Callable, operands: list[Any], records: list[Any]) -> tuple[Any, Callable]:
    """The results of a site's equation, and the map from their cotangents to those of the operands that carry a
    gradient.

    Where the equation asks what is perturbed, records that change with the parameters are differentiated too, as they
    are in the model."""
    moving = [k for k, value in enumerate(site.recorded) if value.is_perturbed and site.asks_what_is_perturbed]

    def moved(operands: list[Any], own: list[Any]) -> tuple[Any, ...]:
        given = dict(zip(moving, own, strict=True))
        return function(operands, [given.get(k, record) for k, record in enumerate(records)])

    results, pull = jax.vjp(moved, operands, [records[k] for k in moving])
    return results, lambda cotangents: pull(cotangents)[0]


def _known(value: Any, known: dict, lengths: dict[int, int]) -> Any:
    """The value of an operand. One that was not recorded has no influence on the derivative, and is zero."""
    if value in known or isinstance(value, Free):
        return known[value]
    assert isinstance(value, Dependent)
    return jnp.zeros((*(lengths[loop] for loop in value.loops), *value.aval.shape), value.aval.dtype)


def spread(x: Any, own: tuple[int, ...], loops: tuple[int, ...], lengths: dict[int, int]) -> Any:
    """A value with the axes of its own loops in front, repeated along the other loops of a site."""
    rest = x.shape[len(own) :]
    aligned = x.reshape((*(lengths[loop] if loop in own else 1 for loop in loops), *rest))
    over = np if isinstance(x, np.ndarray) else jnp
    return over.broadcast_to(aligned, (*(lengths[loop] for loop in loops), *rest))
