"""Which results of sites reach a value unchanged: through reshapes, transpositions, casts and sums."""

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

# Where sizes are equal; a broadcast may only add axes of size one then.
REARRANGED = {"reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim"}
SUMS = {"add", "add_any"}
ELEMENTWISE = {"mul", "div"}


class Origin(NamedTuple):
    """A site whose result reaches a value, and what rearranges it on the way."""

    site: Site
    rearranged: tuple[Callable[[Any], Any], ...]

    def carried(self, x: np.ndarray) -> np.ndarray:
        """An array like the result of the site (its loops in front) as one like the value."""
        lead, places = x.shape[: len(self.site.loops)], self._places()
        return x.reshape(*lead, -1)[..., places.reshape(-1)].reshape(*lead, *places.shape)

    def carried_back(self, x: np.ndarray) -> np.ndarray:
        """An array like the value as one like the result of the site, if neither repeats entries of the other."""
        lead, places = x.shape[: len(self.site.loops)], self._places()
        back = np.empty((*lead, places.size), x.dtype)
        back[..., places.reshape(-1)] = x.reshape(*lead, -1)
        return back.reshape(*lead, *self.site.avals[0].shape)

    def _places(self) -> np.ndarray:
        """Which entry of the result of the site each entry of the value is."""
        shape = self.site.avals[0].shape
        with jax.ensure_compile_time_eval():
            places: Any = np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
            for rearrange in self.rearranged:
                places = rearrange(places)
        return np.asarray(places)


class DataFlow:
    """Where the values of a plan come from and how often they are used, inner plans included."""

    def __init__(self, plan: Plan):
        self._producers: dict[Dependent, tuple[Instruction, int]] = {}
        self._num_uses: Counter[Any] = Counter()
        self._read(plan)

    def _read(self, plan: Plan) -> None:
        for step in plan.steps:
            self._num_uses.update(step.operands)
            self._producers.update({output: (step, k) for k, output in enumerate(step.outputs)})
            for inner in step.inner():
                self._read(inner)
        self._num_uses.update(plan.ends)

    def sources(self, value: Any, *, is_scaled: bool = False) -> list[Origin]:
        """The sites whose results reach `value`, in the order of the program. Whatever is added on the way, the
        cotangents of their results are those of the value, since they reach nothing else.

        With `is_scaled`, sites are also found behind products with other values, entry by entry, and their results
        may be repeated or used elsewhere, so that nothing is said of cotangents."""
        return sorted(self._back(value, (), is_scaled, set()), key=lambda source: source.site.number)

    def _back(self, value: Any, after: tuple, is_scaled: bool, seen: set) -> Iterator[Origin]:
        if value in seen or value not in self._producers or (self._num_uses[value] != 1 and not is_scaled):
            return
        seen.add(value)
        step, position = self._producers[value]
        if isinstance(step, SiteEquation):
            if len(step.outputs) == 1:
                yield Origin(step.site, after)
            if step.site.primitive not in compat.SHIFTED:
                return
        elif not isinstance(step, PlainEquation):
            if isinstance(step, Remat):
                yield from self._back(step.plan.ends[position], after, is_scaled, seen)
            return
        for operand, rearranged in _unchanged(step, is_scaled):
            yield from self._back(operand, (*rearranged, *after), is_scaled, seen)


def _unchanged(step: Any, is_scaled: bool) -> Iterator[tuple[Dependent, Sequence]]:
    """The operands of an equation whose entries are, or are added to, those of its result."""
    eqn = step.eqn if isinstance(step, PlainEquation) else step.site.eqn
    name, shape = compat.name(eqn), step.outputs[0].aval.shape
    operands = [(k, value) for k, value in enumerate(step.operands) if isinstance(value, Dependent)]
    if name in compat.SAME:
        yield from ((value, ()) for _, value in operands)
    elif name in REARRANGED:
        for _, value in operands:
            if is_scaled or value.aval.size == step.outputs[0].aval.size:
                yield value, (lambda x: compat.moved(eqn, x),)
    elif name in SUMS or (name in ELEMENTWISE and is_scaled) or name == "sub":
        for k, value in operands:
            if value.aval.shape == shape and (name != "sub" or k == 0):
                yield value, ()
            elif is_scaled and len(value.aval.shape) == len(shape):
                # Axes of size one are repeated.
                yield value, (lambda x: jnp.broadcast_to(x, shape),)
