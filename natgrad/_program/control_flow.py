"""The part of a scan that depends on parameters alone: counters, and parameters that change from step to step."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from natgrad._program import compat
from natgrad._program.plan import Instruction, Plan
from natgrad._program.values import (
    Carried,
    Dependent,
    Free,
    Result,
    Slice,
    Value,
    evaluate,
    is_floating,
    is_perturbed,
    over_loops,
    strip_weak_type,
    union,
)


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


@dataclass(frozen=True, eq=False)
class Remat(Instruction):
    """A part whose values are forgotten after the forward pass and computed again in the backward pass."""

    plan: Plan
    options: dict
    outputs: tuple[Dependent, ...]
    operands: tuple[Value, ...] = ()

    def run(self, env, inputs, visit):
        part = jax.checkpoint(lambda inputs: self.plan.run(env, inputs, visit), **self.options)
        return part(self.plan.own(inputs))

    def inner(self):
        return (self.plan,)


@dataclass(frozen=True, eq=False)
class Cond(Instruction):
    """A choice between plans. What the plans not taken would have recorded is zero where only products need it, and
    one elsewhere, where few derivatives are not finite: the cotangent is zero."""

    plans: tuple[Plan, ...]
    operands: tuple[Value, ...]
    outputs: tuple[Dependent, ...]
    lengths: dict[int, int]

    def run(self, env, inputs, visit):
        def branch(number: int):
            def taken():
                ends, records = self.plans[number].run(env, inputs, visit)
                blank = [self._blank(plan, visit.wanted) for plan in self.plans]
                blank[number] = records
                return [jnp.asarray(end) for end in ends], list(chain.from_iterable(blank))

            return taken

        return jax.lax.switch(env[self.operands[0]], [branch(number) for number in range(len(self.plans))])

    def inner(self):
        return self.plans

    def _blank(self, plan: Plan, wanted: frozenset[Dependent]) -> list:
        inner = lambda value: (self.lengths[loop] for loop in value.loops[len(plan.loops) :])
        is_product = lambda site: site.eqn is not None and (compat.dot(site.eqn) or compat.convolution(site.eqn))
        others = {v for site in plan.sites() if not is_product(site) for v in site.recorded}
        fill = lambda v: jnp.ones if v in others else jnp.zeros
        return [fill(v)((*inner(v), *v.aval.shape), v.aval.dtype) for v in plan.recorded(wanted)]


@dataclass(frozen=True, eq=False)
class Scan(Instruction):
    """A loop. Inputs of its sites and free values that change over it are scanned with the data."""

    plan: Plan
    parts: compat.ScanParts
    loop: int
    operands: tuple[Value, ...]
    outputs: tuple[Dependent, ...]
    num_carried: int

    def run(self, env, inputs, visit):
        values = [env[value] for value in self.operands]
        start, scanned = values[: self.num_carried], values[self.num_carried :]
        changing = [value for value in dict.fromkeys(self.plan.free()) if self.loop in value.loops]

        def body(carried, at_step):
            data, free, step_inputs = at_step
            here = {**env, **dict(zip(changing, free, strict=True))}
            here.update(zip(self.plan.starts, [*carried, *data], strict=True))
            ends, records = self.plan.run(here, step_inputs, visit)
            new = [strip_weak_type(end) for end in ends[: self.num_carried]]
            return new, (ends[self.num_carried :], records)

        (final, (stacked, records)) = jax.lax.scan(
            body,
            [strip_weak_type(value) for value in start],
            (scanned, [env[value] for value in changing], self.plan.own(inputs)),
            length=self.parts.length,
            reverse=self.parts.reverse,
            unroll=self.parts.unroll,
        )
        return [*final, *stacked], records

    def inner(self):
        return (self.plan,)


def plan_remat(planner: Any, plan: Plan, eqn: compat.Equation, operands: Sequence[Value], scope: Any) -> list[Value]:
    closed, options = compat.rematerialised(eqn)  # pyright: ignore[reportGeneralTypeIssues]
    inside = scope._replace(is_rematerialised=True)
    part = Plan(scope.loops)
    ends = planner.walk(part, closed, operands, inside)
    part.ends = tuple(planner.as_dependent(part, end, inside) for end in ends)
    outputs = tuple(Dependent(end.aval, scope.loops, is_perturbed(end)) for end in part.ends)
    plan.steps.append(Remat(part, options, outputs))
    return list(outputs)


def plan_cond(
    planner: Any, plan: Plan, eqn: compat.Equation, operands: Sequence[Value], scope: Any
) -> list[Value] | None:
    """`None`, for a choice best left as it is, if a branch computes with parameters: free values are known to all, and
    what only the branch not taken would have computed need not be finite."""
    index, *rest = operands
    parts = []
    for closed in compat.branches(eqn) or ():
        part = Plan(scope.loops)
        ends = planner.walk(part, closed, rest, scope)
        part.ends = tuple(planner.as_dependent(part, end, scope) for end in ends)
        if not all(_is_guarded(value, rest) for value in part.free()):
            return None
        parts.append(part)
    carries = [any(map(is_perturbed, ends)) for ends in zip(*(part.ends for part in parts), strict=True)]
    outputs = tuple(Dependent(var.aval, scope.loops, carry) for var, carry in zip(eqn.outvars, carries, strict=True))
    plan.steps.append(Cond(tuple(parts), (index,), outputs, planner.lengths))
    return list(outputs)


def _is_guarded(value: Free, outer: Sequence[Value]) -> bool:
    """Whether a value of a branch is finite if those from outside are: it moves or adds, but computes nothing else."""
    if value in outer or not value.leaves:
        return True
    if not isinstance(value, Result) or compat.name(value.eqn) not in compat.COPYING:
        return False
    return all(_is_guarded(operand, outer) for operand in value.operands)


def plan_scan(planner: Any, plan: Plan, eqn: compat.Equation, operands: Sequence[Value], scope: Any) -> list[Value]:
    """Carried values that never meet the data stay free: parameters passed along, counters, `W[i]` in a `fori_loop`.

    Which those are is found by trial. At first every carried value that starts free is taken to stay the same; a walk
    through the body then shows which of them change, which come to depend on the example, and through which of those a
    derivative goes, until nothing new is found."""
    parts = compat.scan(eqn)
    assert parts is not None
    loop = planner.new_loop(parts.length)
    inside = scope._replace(loops=(*scope.loops, loop))
    constants, carried, scanned = _split(operands, parts)
    _, carried_vars, scanned_vars = _split(parts.body.jaxpr.invars, parts)
    slices = [_slice(value, var.aval, inside.loops) for value, var in zip(scanned, scanned_vars, strict=True)]
    fates = [_Fate() if isinstance(value, Free) else None for value in carried]
    carries = [is_perturbed(value) for value in carried]
    while True:
        free_scan, starts = _starts(parts, loop, carried, carried_vars, fates, carries, inside.loops)
        part = Plan(inside.loops)
        ends = planner.walk(part, parts.body, [*constants, *starts, *slices], inside)
        free_scan.after = [end for end, fate in zip(ends, fates, strict=False) if fate is not None and fate.changes]
        new = [_fate(fate, start, end) for fate, start, end in zip(fates, starts, ends, strict=False)]
        through = [carry or is_perturbed(end) for carry, end in zip(carries, ends, strict=False)]
        if (new, through) == (fates, carries):
            break
        fates, carries = new, through
    dependent = [k for k, fate in enumerate(fates) if fate is None]
    begins = [starts[k] for k in dependent] + slices
    part.starts = tuple(value for value in begins if isinstance(value, Dependent))
    wanted = [ends[k] for k in dependent] + ends[parts.num_carried :]
    part.ends = tuple(planner.as_dependent(part, end, inside) for end in wanted)
    outer = [planner.as_dependent(plan, carried[k], scope) for k in dependent]
    data = [value for value in scanned if isinstance(value, Dependent)]
    through = [*carries, *map(is_perturbed, ends[parts.num_carried :])]
    results = [_result(var.aval, k, starts, free_scan, scope.loops, through[k]) for k, var in enumerate(eqn.outvars)]
    outputs = tuple(value for value in results if isinstance(value, Dependent))
    plan.steps.append(Scan(part, parts, loop, (*outer, *data), outputs, len(outer)))
    return results


class _Fate(NamedTuple):
    """What becomes of a carried value that starts free: whether it changes, and what it then depends on."""

    changes: bool = False
    leaves: frozenset[int] = frozenset()
    loops: frozenset[int] = frozenset()


def _fate(fate: _Fate | None, start: Any, end: Value) -> _Fate | None:
    """What a walk through the body has shown of it; `None` for a value that depends on the example."""
    if fate is None or isinstance(end, Dependent):
        return None
    if not fate.changes and end is start:
        return fate
    return _Fate(True, fate.leaves | end.leaves | start.leaves, fate.loops | {*end.loops, *start.loops})


def _starts(parts, loop, carried, variables, fates, carries, loops) -> tuple[FreeScan, list[Value]]:
    """What the carried values are inside the body."""
    changing = [k for k, fate in enumerate(fates) if fate is not None and fate.changes]
    scan = FreeScan(parts, loop, [carried[k] for k in changing])
    # All of them have the axes of all loops around that any of them changes over.
    around = tuple(sorted(union(fates[k].loops for k in changing) | {loop}))
    for position, k in enumerate(changing):
        fate, aval = fates[k], variables[k].aval
        leaves = fate.leaves if is_floating(aval) else frozenset()
        before = Carried(aval, leaves, around, scan, position, False)
        scan.before = [*scan.before, before]
    before = dict(zip(changing, scan.before, strict=True))
    dependent = lambda k: Dependent(variables[k].aval, loops, carries[k] and is_floating(variables[k].aval))
    unchanged = lambda k: carried[k] if fates[k] is not None else dependent(k)
    return scan, [before.get(k) or unchanged(k) for k in range(len(carried))]


def _result(aval: Any, k: int, starts: list[Value], scan: FreeScan, loops: tuple[int, ...], carries: bool) -> Value:
    """What the scan returns in place `k`: the last of a carried value, or what the steps stacked up."""
    start = starts[k] if k < len(starts) else None
    if isinstance(start, Carried) and start.scan is scan:
        outer = tuple(loop for loop in start.loops if loop != scan.loop)
        return Carried(aval, start.leaves, outer, scan, start.position, True)
    return start if isinstance(start, Free) else Dependent(aval, loops, carries and is_floating(aval))


def _slice(value: Value, aval: Any, loops: tuple[int, ...]) -> Value:
    """What one step sees of an array that is scanned over."""
    if isinstance(value, Free):
        return Slice(aval, value.leaves, tuple(sorted({*value.loops, loops[-1]})), value, loops[-1])
    return Dependent(aval, loops, value.is_perturbed)


def _split(sequence: Sequence[Any], parts: compat.ScanParts) -> tuple[list, list, list]:
    """Constants, carried values and scanned arrays."""
    first, second = parts.num_constants, parts.num_constants + parts.num_carried
    return list(sequence[:first]), list(sequence[first:second]), list(sequence[second:])
