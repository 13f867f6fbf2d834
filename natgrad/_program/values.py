"""The two kinds of value in the program of one example.

A *dependent* value differs from example to example. A *free* value is made of parameters alone; it is never computed
for each example, but kept as an expression of the parameters. A gradient with respect to it can then be carried on to
the parameters through any computation: slices, casts, products of factors, normalisation.

Arrays of values that change over scans have one axis for each of these loops in front: `loops ... shape ...`."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from natgrad._program import compat


@dataclass(frozen=True, eq=False)
class Dependent:
    """A value that differs from example to example.

    - `loops`: the scans inside which it is computed, the outermost first.
    - `is_perturbed`: whether it changes with the parameters, so that a derivative goes through it."""

    aval: Any
    loops: tuple[int, ...]
    is_perturbed: bool = False


@dataclass(frozen=True, eq=False)
class Free:
    """A value that is the same for every example.

    - `leaves`: the parameters that it carries a gradient to.
    - `loops`: the scans over which it changes; their axes stand in front of its value."""

    aval: Any
    leaves: frozenset[int]
    loops: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Leaf(Free):
    """A parameter, or an input that the examples share."""

    index: int


@dataclass(frozen=True, eq=False)
class Constant(Free):
    """A literal of the program, or an array that the model has captured."""

    value: Any


@dataclass(frozen=True, eq=False)
class Result(Free):
    """One of the results of an equation between free values."""

    eqn: compat.Equation
    operands: tuple[Free, ...]
    position: int


@dataclass(frozen=True, eq=False)
class Slice(Free):
    """The slice of an array that one step of a scan reads."""

    whole: Free
    loop: int


@dataclass(frozen=True, eq=False)
class Carried(Free):
    """A free value that a scan carries along, before each step or, with `is_final`, after the last.

    `scan` is a `FreeScan`, and `position` counts its carried values."""

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
    leaves = frozenset() if compat.name(eqn) == "stop_gradient" else union(operand.leaves for operand in operands)
    loops = tuple(sorted(union(operand.loops for operand in operands)))
    return [
        Result(var.aval, leaves if is_floating(var.aval) else frozenset(), loops, eqn, tuple(operands), position)
        for position, var in enumerate(eqn.outvars)
    ]


def evaluate(
    values: Sequence[Free],
    leaves: Sequence[Any],
    known: Mapping[Any, Any] | None = None,
    inside: Collection[int] = (),
) -> list[Any]:
    """Evaluate free values for given parameters, each with the axes of its loops in front.

    `known` maps some free values to their arrays, which are then not computed. With `inside`, everything is evaluated
    at one step of these loops, whose axes are then absent."""
    memory: dict[Any, Any] = dict(known or {})

    def outer(loops: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(loop for loop in loops if loop not in inside)

    def evaluate_one(value: Free) -> Any:
        if value in memory:
            return memory[value]
        match value:
            case Leaf():
                result = leaves[value.index]
            case Constant():
                result = value.value
            case Slice():
                result = evaluate_one(value.whole)
            case Result():
                key = (id(value.eqn), value.operands)
                if key not in memory:
                    operand_loops = [outer(operand.loops) for operand in value.operands]
                    function = over_loops(equation_function(value.eqn), operand_loops, outer(value.loops))
                    memory[key] = function(*map(evaluate_one, value.operands))
                result = memory[key][value.position]
            case Carried():
                if value.scan not in memory:
                    memory[value.scan] = value.scan.run(*map(evaluate_one, value.scan.operands), inside=inside)
                result = memory[value.scan][value.is_final][value.position]
            case _:
                raise AssertionError(type(value))
        memory[value] = result
        return result

    return [evaluate_one(value) for value in values]


def equation_function(eqn: compat.Equation) -> Callable[..., tuple]:
    """An equation as a function of its operands."""
    return lambda *operands: tuple(compat.evaluate(eqn, list(operands)))


def over_loops(
    function: Callable, operand_loops: Sequence[tuple[int, ...]], loops: tuple[int, ...], lengths: Any = None
) -> Callable:
    """Map a function of one step over `loops`, whose axes stand in front of its operands and results.

    `operand_loops` are the loops over which each operand changes. `lengths` are needed only where no operand changes
    over a loop: the result is then repeated."""
    for loop in reversed(loops):
        axes = tuple(0 if loop in changing else None for changing in operand_loops)
        if any(axis == 0 for axis in axes):
            function = jax.vmap(function, in_axes=axes)
        else:
            function = _repeat_results(function, lengths[loop])
    return function


def _repeat_results(function: Callable, length: int) -> Callable:
    def repeated(*operands: Any) -> Any:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (length, *jnp.shape(x))), function(*operands))

    return repeated


def is_floating(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def union(sets: Any) -> frozenset:
    return frozenset().union(*sets)


def strip_weak_type(x: ArrayLike) -> jax.Array:
    """An array without JAX's weak type. A scan needs carried values to have one type at every step, weak or not."""
    return jax.lax.convert_element_type(x, jnp.result_type(x))
