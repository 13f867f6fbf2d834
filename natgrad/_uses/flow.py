"""Which results of sites reach a value through reshapes, transpositions, casts and sums alone.

A bias belongs to a weight if it is added to a value that the weight's results reach in this way."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from natgrad._program import compat
from natgrad._program.control_flow import Remat
from natgrad._program.plan import Instruction, PlainEquation, Plan, Site, SiteEquation
from natgrad._program.values import Dependent

# Rearrangements that keep every entry if they keep the size: a broadcast can then only add axes of size one.
REARRANGEMENTS = {"reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim"}
PRODUCTS = {"mul", "div"}


class Origin(NamedTuple):
    """A site whose result reaches a value, and the rearrangements on the way from the result to the value."""

    site: Site
    rearrangements: tuple[Callable[[Any], Any], ...]

    def to_value(self, x: np.ndarray) -> np.ndarray:
        """Rearrange an array like the result of the site, with its loops in front, into an array like the value."""
        loops, entries = x.shape[: len(self.site.loops)], self._entries()
        return x.reshape(*loops, -1)[..., entries.reshape(-1)].reshape(*loops, *entries.shape)

    def to_result(self, x: np.ndarray) -> np.ndarray:
        """The inverse of `to_value`, where every entry of the result reaches the value once."""
        loops, entries = x.shape[: len(self.site.loops)], self._entries()
        result = np.empty((*loops, entries.size), x.dtype)
        result[..., entries.reshape(-1)] = x.reshape(*loops, -1)
        return result.reshape(*loops, *self.site.avals[0].shape)

    def _entries(self) -> np.ndarray:
        """The number of the result's entry at each place of the value."""
        shape = self.site.avals[0].shape
        with jax.ensure_compile_time_eval():
            numbers: Any = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
            for rearrange in self.rearrangements:
                numbers = rearrange(numbers)
        return np.asarray(numbers)


class DataFlow:
    """The instruction that computes each value of a plan, and how often each is used; with all inner plans."""

    def __init__(self, plan: Plan):
        self._producers: dict[Dependent, tuple[Instruction, int]] = {}
        self._num_uses: Counter[Any] = Counter()
        self._add(plan)

    def _add(self, plan: Plan) -> None:
        for instruction in plan.instructions:
            self._num_uses.update(instruction.operands)
            self._producers.update({output: (instruction, k) for k, output in enumerate(instruction.outputs)})
            for inner_plan in instruction.inner_plans():
                self._add(inner_plan)
        self._num_uses.update(plan.ends)

    def origins(self, value: Any, *, is_scaled: bool = False) -> list[Origin]:
        """The sites whose results reach `value`, in the order of the program.

        They reach nothing else, so their results have the cotangents of `value`, whatever is added on the way. With
        `is_scaled` that is given up: results may be multiplied entry by entry, repeated, or used elsewhere too."""
        return sorted(self._go_back(value, (), is_scaled, set()), key=lambda origin: origin.site.number)

    def _go_back(self, value: Any, rearrangements: tuple, is_scaled: bool, seen: set) -> Iterator[Origin]:
        """The origins of a value that `rearrangements` carry on to the value asked for."""
        if value in seen or value not in self._producers or (self._num_uses[value] != 1 and not is_scaled):
            return
        seen.add(value)
        instruction, position = self._producers[value]
        if isinstance(instruction, SiteEquation):
            if len(instruction.outputs) == 1:
                yield Origin(instruction.site, rearrangements)
            if instruction.site.primitive not in compat.SUMS_AND_DIFFERENCES:
                return
        elif not isinstance(instruction, PlainEquation):
            if isinstance(instruction, Remat):
                yield from self._go_back(instruction.plan.ends[position], rearrangements, is_scaled, seen)
            return
        for operand, earlier in _kept_operands(instruction, is_scaled):
            yield from self._go_back(operand, (*earlier, *rearrangements), is_scaled, seen)


def _kept_operands(
    instruction: PlainEquation | SiteEquation, is_scaled: bool
) -> Iterator[tuple[Dependent, Sequence[Callable]]]:
    """The operands of an equation whose entries, or sums with them, make up its result; with their rearrangements."""
    eqn: Any = instruction.eqn if isinstance(instruction, PlainEquation) else instruction.site.eqn
    name, shape = compat.name(eqn), instruction.outputs[0].aval.shape
    operands = [(k, value) for k, value in enumerate(instruction.operands) if isinstance(value, Dependent)]
    if name in compat.IDENTITIES:
        yield from ((value, ()) for _, value in operands)
    elif name in REARRANGEMENTS:
        for _, value in operands:
            if is_scaled or value.aval.size == instruction.outputs[0].aval.size:
                yield value, (functools.partial(compat.rearrange, eqn),)
    elif name in compat.SUMS_AND_DIFFERENCES or (name in PRODUCTS and is_scaled):
        for k, value in operands:
            if value.aval.shape == shape and (name != "sub" or k == 0):
                yield value, ()
            elif is_scaled and len(value.aval.shape) == len(shape):
                # Axes of size one are repeated.
                yield value, (lambda x: jnp.broadcast_to(x, shape),)
