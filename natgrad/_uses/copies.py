"""Weights that are copies of a parameter: reshaped, transposed, sliced, cast, scaled, joined with others.

Where every entry of the parameter stands at most once in the weight, squares and products of gradients with respect to
the weight can be carried over to the parameter entry by entry, without forming the gradient of each example. Which
entry stands where is found by sending the numbers of the entries through the equations (`EntryCopy.index_map`)."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from natgrad._check import is_concrete
from natgrad._program import compat
from natgrad._program.values import (
    Carried,
    Constant,
    Free,
    Leaf,
    Result,
    Slice,
    equation_function,
    evaluate,
    is_floating,
    over_loops,
)
from natgrad._uses.base import namespace_of, spread

# Equations that scale entries, besides those that copy them (`compat.COPYING`).
SCALED = {"mul", "div", "neg"}


@dataclass(frozen=True, eq=False)
class EntryCopy:
    """A free value as a copy of one parameter.

    - `value`, `origin`: the copy and the parameter.
    - `lengths`: the lengths of scans.
    - `is_scaled`: whether entries may be multiplied by something; `is_uniform`: whether all by one number.
    - `is_mixed`: whether there may be entries that are not of the parameter.
    - `is_plain`: whether the equations alone show that no entry is repeated."""

    value: Free
    origin: Free
    lengths: dict[int, int]
    is_scaled: bool
    is_uniform: bool
    is_mixed: bool
    is_plain: bool

    def place(self, x: Any, fill: Any = 0) -> Any:
        """The copy of an array like the parameter, without scaling, and with `fill` for entries from elsewhere."""
        return self._place(self.value, x, fill)

    def collect(self, x: Any) -> Any:
        """The transpose of `place`: add up the entries of an array like the value where the parameter has them."""
        _, pull = jax.vjp(self.place, jnp.zeros(self._shape(self.origin), x.dtype))
        return pull(x)[0]

    def index_map(self) -> np.ndarray | None:
        """The number of the parameter's entry at each place of the value, -1 for entries from elsewhere.

        `None` if that depends on arrays that are being traced."""
        shape = self._shape(self.origin)
        # Numbers are copied like the entries they number: what arrives at a place says where it comes from.
        numbers = np.arange(np.prod(shape, dtype=int), dtype=np.int32).reshape(shape)
        if self.value is self.origin:
            return numbers
        # Which entries are where is a property of the program, needed while a step is being traced.
        with jax.ensure_compile_time_eval():
            placed = self.place(numbers, -1)
        return np.asarray(placed) if is_concrete(placed) else None

    def _place(self, value: Free, x: Any, fill: Any) -> Any:
        """`place` for a value between the parameter and the copy."""
        if value is self.origin:
            return x
        if isinstance(value, Slice):
            return self._place(value.whole, x, fill)
        assert isinstance(value, Result)
        k = source(value, self.origin.leaves)
        assert k is not None
        inner, name = value.operands[k], compat.name(value.eqn)
        placed = self._place(inner, x, fill)
        if name in compat.IDENTITIES:
            return placed
        if name in compat.SUMS_AND_DIFFERENCES | SCALED:
            # Operands have the shape of the result, or one of them is a number.
            missing_rank = len(value.aval.shape) - len(inner.aval.shape)
            placed = spread(placed, inner.loops, value.loops, self.lengths)
            num_loops = len(value.loops)
            placed = placed.reshape((*placed.shape[:num_loops], *(1,) * missing_rank, *placed.shape[num_loops:]))
            return namespace_of(placed).broadcast_to(placed, self._shape(value))
        # By NumPy where it can be: JAX would compile a program for every shape.
        if isinstance(placed, np.ndarray) and name in compat.BY_NUMPY and not value.loops:
            return compat.rearrange(value.eqn, placed)
        operands = [_other_operand(operand, fill, placed.dtype) for operand in value.operands]
        operands[k] = (placed, inner.loops)
        operand_loops = [loops for _, loops in operands]
        function = over_loops(equation_function(value.eqn), operand_loops, value.loops, self.lengths)
        return function(*(array for array, _ in operands))[value.position]

    def _shape(self, value: Free) -> tuple[int, ...]:
        return (*(self.lengths[loop] for loop in value.loops), *value.aval.shape)


def copy_of(value: Free, origin: Free, lengths: dict[int, int]) -> EntryCopy | None:
    """`value` as a copy of `origin`, found by going back through its equations; `None` if it is no copy."""
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
        others = [operand for position, operand in enumerate(current.operands) if position != k]
        if (name == "div" and k == 1) or not all(map(_is_number_or_fixed, others)):
            return None
        same_size = inner.aval.size == current.aval.size and inner.loops == current.loops
        in_place = name in compat.IDENTITIES | compat.REARRANGEMENTS or (same_size and name != "gather")
        is_plain &= inner.loops == current.loops and in_place
        is_uniform &= name not in SCALED or all(map(_is_repeated_number, others))
        is_scaled |= name in SCALED or (name == "sub" and k == 1)
        is_mixed |= name in ("concatenate", "pad", "gather")
        current = inner
    return EntryCopy(value, origin, lengths, is_scaled, is_uniform, is_mixed, is_plain)


def leaf_of(value: Free, leaf: int) -> Free | None:
    """The parameter inside an expression, reached through operands that carry its gradient."""
    if isinstance(value, Leaf):
        return value if value.index == leaf else None
    operands = [value.whole] if isinstance(value, Slice) else list(getattr(value, "operands", ()))
    candidates = (leaf_of(operand, leaf) for operand in operands if leaf in operand.leaves)
    return next((candidate for candidate in candidates if candidate is not None), None)


def source(value: Result, leaves: frozenset[int]) -> int | None:
    """The position of the operand through which a value depends on parameters; `None` if there are several."""
    positions = [k for k, operand in enumerate(value.operands) if leaves & operand.leaves]
    return positions[0] if len(positions) == 1 else None


def _is_repeated_number(value: Free) -> bool:
    """Whether all entries of a value are one number, which does not change over a loop."""
    if value.loops:
        return False
    if isinstance(value, Result) and compat.name(value.eqn) in compat.IDENTITIES | {"broadcast_in_dim", "reshape"}:
        return _is_repeated_number(value.operands[0])
    return value.aval.size == 1


def _is_number_or_fixed(value: Free) -> bool:
    """Whether the places of entries do not depend on a value: it holds numbers, or indices that are constant."""
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


def _other_operand(value: Free, fill: Any, dtype: Any) -> tuple[Any, tuple[int, ...]]:
    """An operand that is not of the parameter, and the loops it changes over: numbers become `fill`, indices stay."""
    if is_floating(value.aval):
        return jnp.full(value.aval.shape, fill, dtype), ()
    return evaluate([value], ())[0], value.loops
