"""Scans, conditions and rematerialisation in the program of one example.

Each has an instruction that runs it (`Scan`, `Cond`, `Remat`) and a function that plans it. A scan may also carry
values that are made of parameters alone: counters, `W[i]` in a `fori_loop`, parameters that change from step to step.
These stay free, and a `FreeScan` computes them once for all examples."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from natgrad._program import compat
from natgrad._program.plan import Instruction, Plan, Scope
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
    """The part of a scan that is made of parameters alone.

    - `starts`: the carried values before the first step.
    - `before`: symbols for the carried values before a step.
    - `after`: the carried values after that step, as expressions of `before`; known once the body has been planned."""

    parts: compat.ScanParts
    loop: int
    starts: Sequence[Free]
    before: Sequence[Carried] = ()
    after: Sequence[Free] = ()

    @property
    def operands(self) -> list[Free]:
        """The values that a run needs: the start, then the scanned arrays, then what all steps share."""
        return [*self.starts, *self._slices, *self._fixed]

    @property
    def loops(self) -> tuple[int, ...]:
        """The scans around this one over which its values change."""
        return tuple(sorted(union(operand.loops for operand in self.operands) - {self.loop}))

    def run(self, *operands: Any, inside: Collection[int] = ()) -> tuple[tuple, tuple]:
        """The carried values before every step, stacked, and after the last."""

        def outer(loops: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(loop for loop in loops if loop != self.loop and loop not in inside)

        return over_loops(self._run, [outer(value.loops) for value in self.operands], outer(self.loops))(*operands)

    def _run(self, *operands: Any) -> tuple[tuple, tuple]:
        """Run at one step of the loops around."""
        num_starts, num_slices = len(self.starts), len(self._slices)
        starts = [strip_weak_type(value) for value in operands[:num_starts]]
        scanned = list(operands[num_starts : num_starts + num_slices])
        fixed = dict(zip(self._fixed, operands[num_starts + num_slices :], strict=True))
        inside = {self.loop, *self.loops}

        def body(carried, slices):
            known = {**fixed, **dict(zip(self.before, carried, strict=True))}
            known.update(zip(self._slices, slices, strict=True))
            new = evaluate(self.after, (), known, inside)
            return [jnp.asarray(v, old.dtype) for v, old in zip(new, carried, strict=True)], tuple(carried)

        final, before = jax.lax.scan(body, starts, scanned, length=self.parts.length, reverse=self.parts.reverse)
        return before, tuple(final)

    @property
    def _slices(self) -> list[Free]:
        return [value for value in self._references if self.loop in value.loops]

    @property
    def _fixed(self) -> list[Free]:
        return [value for value in self._references if self.loop not in value.loops]

    @property
    def _references(self) -> list[Free]:
        """The values from outside the body to which its steps refer."""

        def references(value: Free) -> Iterator[Free]:
            if value in self.before:
                return
            match value:
                case Slice() if value.loop == self.loop:
                    yield value
                case Slice() if self.loop in value.loops:
                    yield from references(value.whole)
                case Result() if self.loop in value.loops:
                    yield from chain.from_iterable(map(references, value.operands))
                case Carried() if self.loop in value.loops:
                    yield from chain.from_iterable(map(references, value.scan.operands))
                case _:
                    yield value

        return list(dict.fromkeys(chain.from_iterable(map(references, self.after))))


@dataclass(frozen=True, eq=False)
class Remat(Instruction):
    """A `jax.checkpoint`: values of the plan are forgotten after the forward pass and computed again in the backward
    pass."""

    plan: Plan
    options: dict
    outputs: tuple[Dependent, ...]
    operands: tuple[Value, ...] = ()

    def run(self, env, inputs, visit):
        checkpointed = jax.checkpoint(lambda inputs: self.plan.run(env, inputs, visit), **self.options)
        return checkpointed(self.plan.restrict(inputs))

    def inner_plans(self):
        return (self.plan,)


@dataclass(frozen=True, eq=False)
class Cond(Instruction):
    """A choice between plans.

    Every branch returns the records of all plans. For the plans not taken these are blank: zeros at sites that are
    products, ones at other sites. Any finite derivative will do there, since the cotangent is zero, and at one few
    functions have a derivative that is not finite."""

    plans: tuple[Plan, ...]
    operands: tuple[Value, ...]
    outputs: tuple[Dependent, ...]
    lengths: dict[int, int]

    def run(self, env, inputs, visit):
        def branch(number: int):
            def run_branch():
                ends, records = self.plans[number].run(env, inputs, visit)
                all_records = [self._blank(plan, visit.wanted) for plan in self.plans]
                all_records[number] = records
                return [jnp.asarray(end) for end in ends], list(chain.from_iterable(all_records))

            return run_branch

        return jax.lax.switch(env[self.operands[0]], [branch(number) for number in range(len(self.plans))])

    def inner_plans(self):
        return self.plans

    def _blank(self, plan: Plan, wanted: frozenset[Dependent]) -> list:
        """Records of a plan that does not run."""
        needed_elsewhere = {value for site in plan.sites() if not _is_product(site.eqn) for value in site.recorded}
        blank = []
        for value in plan.recorded(wanted):
            fill = jnp.ones if value in needed_elsewhere else jnp.zeros
            lengths = (self.lengths[loop] for loop in value.loops[len(plan.loops) :])
            blank.append(fill((*lengths, *value.aval.shape), value.aval.dtype))
        return blank


def _is_product(eqn: compat.Equation | None) -> bool:
    return eqn is not None and (compat.dot(eqn) is not None or compat.convolution(eqn) is not None)


@dataclass(frozen=True, eq=False)
class Scan(Instruction):
    """A scan over the data, the inputs of its sites, and the free values that change over it.

    `operands` are the carried values, then the scanned arrays, without the free ones among both."""

    plan: Plan
    parts: compat.ScanParts
    loop: int
    operands: tuple[Value, ...]
    outputs: tuple[Dependent, ...]
    num_carried: int

    def run(self, env, inputs, visit):
        values = [env[value] for value in self.operands]
        starts, scanned = values[: self.num_carried], values[self.num_carried :]
        changing = [value for value in dict.fromkeys(self.plan.free()) if self.loop in value.loops]

        def body(carried, slices):
            data, free, step_inputs = slices
            step_env = {**env, **dict(zip(changing, free, strict=True))}
            step_env.update(zip(self.plan.starts, [*carried, *data], strict=True))
            ends, records = self.plan.run(step_env, step_inputs, visit)
            new = [strip_weak_type(end) for end in ends[: self.num_carried]]
            return new, (ends[self.num_carried :], records)

        (final, (stacked, records)) = jax.lax.scan(
            body,
            [strip_weak_type(value) for value in starts],
            (scanned, [env[value] for value in changing], self.plan.restrict(inputs)),
            length=self.parts.length,
            reverse=self.parts.reverse,
            unroll=self.parts.unroll,
        )
        return [*final, *stacked], records

    def inner_plans(self):
        return (self.plan,)


def plan_remat(planner: Any, plan: Plan, eqn: compat.Equation, operands: Sequence[Value], scope: Scope) -> list[Value]:
    """Add a `jax.checkpoint` to a plan; returns its results."""
    closed, options = compat.rematerialised(eqn)  # pyright: ignore[reportGeneralTypeIssues]
    inside = scope._replace(is_rematerialised=True)
    body_plan = Plan(scope.loops)
    ends = planner.walk(body_plan, closed, operands, inside)
    body_plan.ends = tuple(planner.as_dependent(body_plan, end, inside) for end in ends)
    outputs = tuple(Dependent(end.aval, scope.loops, is_perturbed(end)) for end in body_plan.ends)
    plan.instructions.append(Remat(body_plan, options, outputs))
    return list(outputs)


def plan_cond(
    planner: Any, plan: Plan, eqn: compat.Equation, operands: Sequence[Value], scope: Scope
) -> list[Value] | None:
    """Add a choice between branches to a plan; returns its results.

    `None` if a branch computes with parameters, and the equation has to stay whole: free values are computed whichever
    branch is taken, and in a branch not taken they need not be finite."""
    index, *branch_operands = operands
    inside = scope._replace(is_optional=scope.is_optional or isinstance(index, Dependent))
    branch_plans = []
    for closed in compat.branches(eqn) or ():
        branch_plan = Plan(scope.loops)
        ends = planner.walk(branch_plan, closed, branch_operands, inside)
        branch_plan.ends = tuple(planner.as_dependent(branch_plan, end, inside) for end in ends)
        if not all(_only_copies(value, branch_operands) for value in branch_plan.free()):
            return None
        branch_plans.append(branch_plan)
    ends_by_output = zip(*(branch_plan.ends for branch_plan in branch_plans), strict=True)
    outputs = tuple(
        Dependent(var.aval, scope.loops, any(map(is_perturbed, ends)))
        for var, ends in zip(eqn.outvars, ends_by_output, strict=True)
    )
    plan.instructions.append(Cond(tuple(branch_plans), (index,), outputs, planner.lengths))
    return list(outputs)


def _only_copies(value: Free, outer: Sequence[Value]) -> bool:
    """Whether a value of a branch is finite if the values from outside are: it copies their entries or adds them."""
    if value in outer or not value.leaves:
        return True
    if not isinstance(value, Result) or compat.name(value.eqn) not in compat.COPYING:
        return False
    return all(_only_copies(operand, outer) for operand in value.operands)


def plan_scan(planner: Any, plan: Plan, eqn: compat.Equation, operands: Sequence[Value], scope: Scope) -> list[Value]:
    """Add a scan to a plan; returns its results, of which some may be free.

    Carried values that never meet the data stay free. Which these are is found by trial: at first every carried value
    that starts free is assumed to stay as it is. Planning the body then shows which of them change, which depend on
    the example after all, and which carry a derivative. That is repeated until the assumptions hold."""
    parts = compat.scan(eqn)
    assert parts is not None
    loop = planner.new_loop(parts.length)
    inside = scope._replace(loops=(*scope.loops, loop))
    constants, carried, scanned = _split(operands, parts)
    _, carried_vars, scanned_vars = _split(parts.body.jaxpr.invars, parts)
    slices = [_slice(value, var.aval, inside.loops) for value, var in zip(scanned, scanned_vars, strict=True)]
    kinds = [_CarriedKind(isinstance(value, Free), is_perturbed(value)) for value in carried]
    while True:
        free_scan = FreeScan(parts, loop, [value for value, kind in zip(carried, kinds, strict=True) if kind.changes])
        starts = _values_inside(free_scan, carried, [var.aval for var in carried_vars], kinds, inside.loops)
        body_plan = Plan(inside.loops)
        ends = planner.walk(body_plan, parts.body, [*constants, *starts, *slices], inside)
        new_carried, stacked = ends[: parts.num_carried], ends[parts.num_carried :]
        free_scan.after = [end for end, kind in zip(new_carried, kinds, strict=True) if kind.changes]
        found_kinds = [kind.after_step(*values) for kind, *values in zip(kinds, starts, new_carried, strict=True)]
        if found_kinds == kinds:
            break
        kinds = found_kinds
    dependent = [k for k, kind in enumerate(kinds) if not kind.is_free]
    body_plan.starts = tuple(v for v in [*(starts[k] for k in dependent), *slices] if isinstance(v, Dependent))
    body_plan.ends = tuple(
        planner.as_dependent(body_plan, end, inside) for end in [*(new_carried[k] for k in dependent), *stacked]
    )
    perturbed = [*(kind.is_perturbed for kind in kinds), *map(is_perturbed, stacked)]
    results = [
        _final(starts[k], var.aval, free_scan)
        if k < len(kinds) and kinds[k].is_free
        else Dependent(var.aval, scope.loops, perturbed[k] and is_floating(var.aval))
        for k, var in enumerate(eqn.outvars)
    ]
    outputs = tuple(value for value in results if isinstance(value, Dependent))
    outer = [planner.as_dependent(plan, carried[k], scope) for k in dependent]
    data = [value for value in scanned if isinstance(value, Dependent)]
    plan.instructions.append(Scan(body_plan, parts, loop, (*outer, *data), outputs, len(outer)))
    return results


class _CarriedKind(NamedTuple):
    """What is assumed of a value that a scan carries.

    `leaves` and `loops` are the parameters and scans on which a free value depends if it changes from step to step."""

    is_free: bool
    is_perturbed: bool
    changes: bool = False
    leaves: frozenset[int] = frozenset()
    loops: frozenset[int] = frozenset()

    def after_step(self, start: Any, end: Value) -> "_CarriedKind":
        """The kind, corrected by what planning one step has shown."""
        perturbed = self.is_perturbed or is_perturbed(end)
        if not self.is_free or isinstance(end, Dependent):
            return _CarriedKind(False, perturbed)
        if not self.changes and end is start:
            return self._replace(is_perturbed=perturbed)
        leaves, loops = self.leaves | end.leaves | start.leaves, self.loops | {*end.loops, *start.loops}
        return _CarriedKind(True, perturbed, True, leaves, loops)


def _values_inside(
    scan: FreeScan, carried: Sequence[Value], avals: Sequence, kinds: Sequence[_CarriedKind], loops: tuple[int, ...]
) -> list[Value]:
    """The carried values as the body of a scan sees them; sets `scan.before`."""
    # All that change have the axes of all loops around over which any of them changes: they share one scan.
    around = tuple(sorted(union(kind.loops for kind in kinds if kind.changes) | {scan.loop}))
    before: list[Carried] = []
    values: list[Value] = []
    for value, aval, kind in zip(carried, avals, kinds, strict=True):
        if not kind.is_free:
            values.append(Dependent(aval, loops, kind.is_perturbed and is_floating(aval)))
        elif kind.changes:
            leaves = kind.leaves if is_floating(aval) else frozenset()
            before.append(Carried(aval, leaves, around, scan, len(before), False))
            values.append(before[-1])
        else:
            values.append(value)
    scan.before = before
    return values


def _final(start: Value, aval: Any, scan: FreeScan) -> Value:
    """A free carried value after the last step of the scan."""
    if not isinstance(start, Carried) or start.scan is not scan:
        return start
    outer = tuple(loop for loop in start.loops if loop != scan.loop)
    return Carried(aval, start.leaves, outer, scan, start.position, True)


def _slice(value: Value, aval: Any, loops: tuple[int, ...]) -> Value:
    """The slice of a scanned array that one step of the innermost of `loops` reads."""
    if isinstance(value, Free):
        return Slice(aval, value.leaves, tuple(sorted({*value.loops, loops[-1]})), value, loops[-1])
    return Dependent(aval, loops, value.is_perturbed)


def _split(sequence: Sequence[Any], parts: compat.ScanParts) -> tuple[list, list, list]:
    """Constants, carried values and scanned arrays."""
    first, second = parts.num_constants, parts.num_constants + parts.num_carried
    return list(sequence[:first]), list(sequence[first:second]), list(sequence[second:])
