"""Weights that are copies of a parameter: reshaped, transposed, sliced, cast, scaled, joined with others.

Where every entry of a weight is an entry of the parameter, at most once, squares and products of its gradient can be
carried over entry by entry, and the gradient of each example is never formed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from natgrad._check import is_concrete
from natgrad._program import compat
from natgrad._program.values import Carried, Constant, Free, Leaf, Result, Slice, evaluate, is_floating, over_loops
from natgrad._uses.base import spread

# Beyond equations that copy, those that scale.
SCALED = {"mul", "div", "neg"}


@dataclass(frozen=True, eq=False)
class EntryCopy:
    """A free value as a copy of one parameter (or of a slice of it, inside a scan).

    `is_scaled`: entries may be multiplied by something, and `is_uniform`: all by one number. `is_mixed`: there may be
    entries that are not the parameter's.
    `is_plain`: by its equations alone, no entry is repeated."""

    value: Free
    origin: Free
    lengths: dict[int, int]
    is_scaled: bool
    is_uniform: bool
    is_mixed: bool
    is_plain: bool

    def place(self, x: Any, fill: Any = 0) -> Any:
        """An array like the parameter, with its entries where the value has them and `fill` where it has others."""
        return self._place(self.value, x, fill)

    def collect(self, x: Any) -> Any:
        """The transpose of `place`: an array like the value, with its entries added up where the parameter has them."""
        _, pull = jax.vjp(self.place, jnp.zeros(self._shape(self.origin), x.dtype))
        return pull(x)[0]

    def index_map(self) -> np.ndarray | None:
        """Which entry of the parameter each entry of the value is, -1 for none; `None` if that is not known now."""
        shape = self._shape(self.origin)
        numbers = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
        if self.value is self.origin:
            return numbers
        with jax.ensure_compile_time_eval():
            placed = self.place(numbers, -1)
        return np.asarray(placed) if is_concrete(placed) else None

    def _place(self, value: Free, x: Any, fill: Any) -> Any:
        if value is self.origin:
            return x
        if isinstance(value, Slice):
            return self._place(value.whole, x, fill)
        assert isinstance(value, Result)
        k = source(value, self.origin.leaves)
        assert k is not None
        inner, name = value.operands[k], compat.name(value.eqn)
        placed = self._place(inner, x, fill)
        if name in compat.SAME:
            return placed
        if name in compat.SHIFTED | SCALED:
            # Shapes are the same, but for a number that goes with an array.
            rank = len(value.aval.shape) - len(inner.aval.shape)
            placed = spread(placed, inner.loops, value.loops, self.lengths)
            loops = len(value.loops)
            placed = placed.reshape((*placed.shape[:loops], *(1,) * rank, *placed.shape[loops:]))
            over = np if isinstance(placed, np.ndarray) else jnp
            return over.broadcast_to(placed, self._shape(value))
        if isinstance(placed, np.ndarray) and name in compat.BY_NUMPY and not value.loops:
            return compat.moved(value.eqn, placed)
        beside = [_beside(operand, fill, placed.dtype) for operand in value.operands]
        beside[k] = (placed, inner.loops)
        step: Callable = lambda *operands: tuple(compat.evaluate(value.eqn, list(operands)))
        steps = over_loops(step, [loops for _, loops in beside], value.loops, self.lengths)
        return steps(*(operand for operand, _ in beside))[value.position]

    def _shape(self, value: Free) -> tuple[int, ...]:
        return (*(self.lengths[loop] for loop in value.loops), *value.aval.shape)


def copy_of(value: Free, origin: Free, lengths: dict[int, int]) -> EntryCopy | None:
    """How `value` copies `origin`; `None` if it is computed from it in some other way."""
    is_scaled, is_uniform, is_mixed, is_plain, current = False, True, False, True, value
    while current is not origin:
        if isinstance(current, Slice):
            current = current.whole
            continue
        if not isinstance(current, Result):
            return None
        k, name = source(current, origin.leaves), compat.name(current.eqn)
        is_real = jnp.issubdtype(current.aval.dtype, jnp.floating)
        if k is None or not is_real or name not in compat.COPYING | SCALED:
            return None
        inner = current.operands[k]
        if (name == "div" and k == 1) or not all(_is_known(o) for j, o in enumerate(current.operands) if j != k):
            return None
        same_size = inner.aval.size == current.aval.size and inner.loops == current.loops
        in_place = name in compat.SAME | compat.MOVED or (same_size and name != "gather")
        is_plain &= inner.loops == current.loops and in_place
        is_uniform &= name not in SCALED or all(_is_number(o) for j, o in enumerate(current.operands) if j != k)
        is_scaled |= name in SCALED or (name == "sub" and k == 1)
        is_mixed |= name in ("concatenate", "pad", "gather")
        current = inner
    return EntryCopy(value, origin, lengths, is_scaled, is_uniform, is_mixed, is_plain)


def leaf_of(value: Free, leaf: int) -> Free | None:
    """The parameter inside an expression, reached through operands that carry its gradient."""
    if isinstance(value, Leaf):
        return value if value.index == leaf else None
    inner = [value.whole] if isinstance(value, Slice) else list(getattr(value, "operands", ()))
    found = (leaf_of(operand, leaf) for operand in inner if leaf in operand.leaves)
    return next((one for one in found if one is not None), None)


def source(value: Result, leaves: frozenset[int]) -> int | None:
    """The one operand through which a value depends on a parameter; `None` if there are several."""
    places = [k for k, operand in enumerate(value.operands) if leaves & operand.leaves]
    return places[0] if len(places) == 1 else None


def _is_number(value: Free) -> bool:
    """Whether a value is one number, perhaps repeated, and the same at every step of a loop."""
    if value.loops:
        return False
    if isinstance(value, Result) and compat.name(value.eqn) in compat.SAME | {"broadcast_in_dim", "reshape"}:
        return _is_number(value.operands[0])
    return value.aval.size == 1


def _is_known(value: Free) -> bool:
    """Whether an operand beside the copied one is a number, whose value does not matter, or an index that is fixed."""
    return is_floating(value.aval) or _is_fixed(value)


def _is_fixed(value: Free) -> bool:
    """Whether a value depends on constants alone."""
    match value:
        case Constant():
            return True
        case Slice():
            return _is_fixed(value.whole)
        case Result():
            return all(map(_is_fixed, value.operands))
        case Carried():
            return all(map(_is_fixed, value.scan.operands))
        case _:
            return False


def _beside(value: Free, fill: Any, dtype: Any) -> tuple[Any, tuple[int, ...]]:
    """What stands beside the copied entries (nothing of the parameter, or an index), and the loops it changes over."""
    if is_floating(value.aval):
        return jnp.full(value.aval.shape, fill, dtype), ()
    return evaluate([value], ())[0], value.loops
