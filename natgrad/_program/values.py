"""The two kinds of value in the program of one example: those that depend on the example, and those that are made of
parameters alone.

A free value is never computed for each example. It is kept as an expression of the parameters, so that gradients with
respect to it can later be carried on to the parameters, whatever was done to them on the way: slices, casts, products
of factors, normalisation."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from natgrad._program import compat


@dataclass(frozen=True, eq=False)
class Dependent:
    """A value that differs from example to example. It is computed inside the scans `loops`. `is_perturbed` says
    whether it changes with the parameters, so that a derivative goes through it."""

    aval: Any
    loops: tuple[int, ...]
    is_perturbed: bool = False


@dataclass(frozen=True, eq=False)
class Free:
    """A value that is the same for every example.

    `leaves` are the parameters it carries a gradient to. `loops` are the scans it changes over, and their axes stand
    in front of its value."""

    aval: Any
    leaves: frozenset[int]
    loops: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Leaf(Free):
    """A parameter, or an input that the examples share."""

    index: int


@dataclass(frozen=True, eq=False)
class Constant(Free):
    value: Any


@dataclass(frozen=True, eq=False)
class Result(Free):
    """One of the results of an equation between free values."""

    eqn: compat.Equation
    operands: tuple[Free, ...]
    position: int


@dataclass(frozen=True, eq=False)
class Slice(Free):
    """What one step of a scan sees of an array that is scanned over."""

    whole: Free
    loop: int


@dataclass(frozen=True, eq=False)
class Carried(Free):
    """A free value that a scan carries along: before each step, or after the last."""

    scan: Any
    position: int
    is_final: bool


Value = Dependent | Free


def is_perturbed(value: Value) -> bool:
    """Whether a value carries a derivative with respect to parameters."""
    return bool(value.leaves) if isinstance(value, Free) else value.is_perturbed


def constant(value: Any) -> Constant:
    return Constant(jax.typeof(value), frozenset(), (), value)


def results(eqn: compat.Equation, operands: Sequence[Free]) -> list[Value]:
    """The results of an equation between free values."""
    carried = frozenset() if compat.name(eqn) == "stop_gradient" else union(operand.leaves for operand in operands)
    loops = tuple(sorted(union(operand.loops for operand in operands)))
    return [
        Result(var.aval, carried if is_floating(var.aval) else frozenset(), loops, eqn, tuple(operands), position)
        for position, var in enumerate(eqn.outvars)
    ]


def evaluate(
    values: Sequence[Free],
    leaves: Sequence[Any],
    known: Mapping[Any, Any] | None = None,
    inside: Collection[int] = (),
) -> list[Any]:
    """The free values for given parameters, each with the axes of its loops in front.

    `known` gives the values of some, in whose place nothing is computed. With `inside`, everything is evaluated at one
    step of these loops, whose axes are then absent."""
    memory: dict[Any, Any] = dict(known or {})
    outer = lambda loops: tuple(loop for loop in loops if loop not in inside)

    def of(value: Free) -> Any:
        if value in memory:
            return memory[value]
        match value:
            case Leaf():
                result = leaves[value.index]
            case Constant():
                result = value.value
            case Slice():
                result = of(value.whole)
            case Result():
                key = (id(value.eqn), value.operands)
                if key not in memory:
                    step = lambda *operands, eqn=value.eqn: tuple(compat.evaluate(eqn, list(operands)))
                    axes = [outer(operand.loops) for operand in value.operands]
                    memory[key] = over_loops(step, axes, outer(value.loops))(*map(of, value.operands))
                result = memory[key][value.position]
            case Carried():
                if value.scan not in memory:
                    memory[value.scan] = value.scan.run(*map(of, value.scan.operands), inside=inside)
                result = memory[value.scan][value.is_final][value.position]
            case _:
                raise AssertionError(type(value))
        memory[value] = result
        return result

    return [of(value) for value in values]


def over_loops(
    function: Callable, operand_loops: Sequence[tuple[int, ...]], loops: tuple[int, ...], lengths: Any = None
) -> Callable:
    """A function of values inside loops as a function of values that have those loops' axes in front.

    `lengths` are needed where no operand changes over a loop, but the result is wanted for every step of it."""
    for loop in reversed(loops):
        axes = tuple(0 if loop in own else None for own in operand_loops)
        if any(axis == 0 for axis in axes):
            function = jax.vmap(function, in_axes=axes)
        else:
            function = _repeated(function, lengths[loop])
    return function


def _repeated(function: Callable, length: int) -> Callable:
    repeat = lambda x: jnp.broadcast_to(x, (length, *jnp.shape(x)))
    return lambda *operands: jax.tree.map(repeat, function(*operands))


def is_floating(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def union(sets: Any) -> frozenset:
    return frozenset().union(*sets)


def strip_weak_type(x: ArrayLike) -> jax.Array:
    """A carried value must keep its type from step to step, also whether it is a weak one."""
    return jax.lax.convert_element_type(x, jnp.result_type(x))
