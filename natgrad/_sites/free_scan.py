"""The part of a scan that depends on parameters alone: counters, and parameters that change from step to step."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp

from natgrad._sites import compat
from natgrad._sites.values import Carried, Free, Result, Slice, evaluate, over_loops, strip_weak_type, union


@dataclass(eq=False)
class FreeScan:
    """A scan without its data. `before` stand for the carried values before a step, and `after` are expressions of
    them for the values after it; these become known once the body of the scan has been planned."""

    parts: compat.ScanParts
    loop: int
    starts: Sequence[Free]
    before: Sequence[Carried] = ()
    after: Sequence[Free] = ()

    @property
    def operands(self) -> list[Free]:
        """What it needs to know: where it starts, what it runs over, and what else its steps refer to."""
        return [*self.starts, *self._slices, *self._fixed]

    @property
    def loops(self) -> tuple[int, ...]:
        """The scans around this one that its values change over."""
        return tuple(sorted(union(operand.loops for operand in self.operands) - {self.loop}))

    def run(self, *operands: Any, inside: Collection[int] = ()) -> tuple[tuple, tuple]:
        """The carried values before every step, stacked, and after the last."""
        outer = lambda loops: tuple(loop for loop in loops if loop != self.loop and loop not in inside)
        return over_loops(self._run, [outer(value.loops) for value in self.operands], outer(self.loops))(*operands)

    def _run(self, *operands: Any) -> tuple[tuple, tuple]:
        first, second = len(self.starts), len(self.starts) + len(self._slices)
        fixed = dict(zip(self._fixed, operands[second:], strict=True))
        inside = {self.loop, *self.loops}

        def body(carried, slices):
            known = {**fixed, **dict(zip(self.before, carried, strict=True))}
            known.update(zip(self._slices, slices, strict=True))
            new = evaluate(self.after, (), known, inside)
            return [jnp.asarray(v, old.dtype) for v, old in zip(new, carried, strict=True)], tuple(carried)

        starts = [strip_weak_type(value) for value in operands[:first]]
        final, before = jax.lax.scan(
            body, starts, list(operands[first:second]), length=self.parts.length, reverse=self.parts.reverse
        )
        return before, tuple(final)

    @property
    def _slices(self) -> list[Free]:
        return [value for value in self._references if self.loop in value.loops]

    @property
    def _fixed(self) -> list[Free]:
        return [value for value in self._references if self.loop not in value.loops]

    @property
    def _references(self) -> list[Free]:
        """Values from outside the body that its steps refer to."""

        def of(value: Free) -> Iterator[Free]:
            if value in self.before:
                return
            match value:
                case Slice() if value.loop == self.loop:
                    yield value
                case Slice() if self.loop in value.loops:
                    yield from of(value.whole)
                case Result() if self.loop in value.loops:
                    yield from chain.from_iterable(map(of, value.operands))
                case Carried() if self.loop in value.loops:
                    yield from chain.from_iterable(map(of, value.scan.operands))
                case _:
                    yield value

        return list(dict.fromkeys(found for value in self.after for found in of(value)))
