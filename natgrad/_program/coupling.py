"""Whether a model treats every example alike, read off its program without running it.

The program of a batch is compared with that of a batch of one, equation by equation. They differ in the size of one
axis of some values, along which the examples stand. If every equation maps slices along that axis to slices, the output
for each example is what the program of a batch of one computes for it. What is not known here counts as coupling, so
that a model passes only if it cannot couple examples; one that does not pass may still be sound."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from natgrad._check import is_concrete
from natgrad._program import compat
from natgrad._program.slices import SAME, EquationPair, is_equal, keeps_slices

# How a value relates to that for a batch of one: the axis along which its slices are the values for single examples;
# `SAME` if it is the same value; or else the name of the primitive that may have coupled examples.
Relation: TypeAlias = int | str


def find_coupling(batch: compat.ClosedJaxpr, single: compat.ClosedJaxpr, axes: Sequence[int | None]) -> str:
    """The primitive by which the program of a batch may couple examples; an empty string if it does not.

    `axes` are those of the examples in the inputs, `None` for inputs that examples share. In the outputs it must be the
    first."""
    relations = _program(batch, single, [SAME if axis is None else axis for axis in axes])
    if all(relation == 0 for relation in relations):
        return ""
    return next((relation for relation in relations if isinstance(relation, str)), "output")


def _program(batch: compat.ClosedJaxpr, single: compat.ClosedJaxpr, inputs: Sequence[Relation]) -> list[Relation]:
    """How the results of two programs relate, given how their inputs do."""
    ours, theirs = batch.jaxpr, single.jaxpr
    counts = [(len(p.jaxpr.eqns), len(p.constants), len(p.jaxpr.outvars)) for p in (batch, single)]
    if counts[0] != counts[1]:
        return ["model"] * len(ours.outvars)
    # For every variable, the one in its place in the other program: two programs may do the same and use it otherwise.
    known: dict[Any, tuple[Any, Relation]] = {}
    known.update(zip(ours.invars, zip(theirs.invars, inputs, strict=True), strict=True))
    for a, b, *values in zip(ours.constvars, theirs.constvars, batch.constants, single.constants, strict=True):
        known[a] = b, SAME if _is_same(*values) else "constant"

    def relation(a: Any, b: Any) -> Relation:
        if compat.is_literal(a) or compat.is_literal(b):
            is_same = compat.is_literal(a) and compat.is_literal(b) and _is_same(a.val, b.val)
            return SAME if is_same else "constant"
        counterpart, related = known[a]
        return related if counterpart is b else "model"

    for a, b in zip(ours.eqns, theirs.eqns, strict=True):
        if compat.name(a) != compat.name(b) or len(a.invars) != len(b.invars) or len(a.outvars) != len(b.outvars):
            return ["model"] * len(ours.outvars)
        found = _equation(a, b, list(map(relation, a.invars, b.invars)))
        known.update(zip(a.outvars, zip(b.outvars, found, strict=True), strict=True))
    return list(map(relation, ours.outvars, theirs.outvars))


def _equation(a: compat.Equation, b: compat.Equation, operands: list[Relation]) -> list[Relation]:
    coupled = next((operand for operand in operands if isinstance(operand, str)), None)
    if coupled is not None:
        return [coupled] * len(a.outvars)
    inner = _inner(a, b, operands)
    if inner is not None:
        return inner
    axes: list[int] = [operand for operand in operands if isinstance(operand, int)]
    results = [_axis(x.aval, y.aval) for x, y in zip(a.outvars, b.outvars, strict=True)]
    if set(axes) <= {SAME} and set(results) <= {SAME}:
        is_same = EquationPair(a, b, axes, axes).agrees()
        return [SAME if is_same else compat.name(a)] * len(results)
    known = [axis for axis in results if axis is not None and axis != SAME]
    keeps = len(known) == len(results) and keeps_slices(EquationPair(a, b, axes, known))
    return list(known) if keeps else [compat.name(a)] * len(results)


def _inner(a: compat.Equation, b: compat.Equation, operands: list[Relation]) -> list[Relation] | None:
    """For equations that hold programs; `None` for others."""
    ours, theirs = compat.called(a), compat.called(b)
    if ours is not None and theirs is not None:
        return _program(ours, theirs, operands)
    ours, theirs = compat.scan(a), compat.scan(b)
    if ours is not None and theirs is not None:
        return _scan(ours, theirs, operands)
    ours, theirs = compat.while_loop(a), compat.while_loop(b)
    if ours is not None and theirs is not None:
        return _while(ours, theirs, operands)
    ours, theirs = compat.branches(a), compat.branches(b)
    if ours is not None and theirs is not None:
        return _branches(ours, theirs, operands)
    return None


def _branches(
    ours: list[compat.ClosedJaxpr], theirs: list[compat.ClosedJaxpr], operands: list[Relation]
) -> list[Relation]:
    """Coupled, unless all examples take the same branch."""
    if operands[0] != SAME or len(ours) != len(theirs):
        return ["cond"] * len(ours[0].jaxpr.outvars)
    found = [_program(*pair, operands[1:]) for pair in zip(ours, theirs, strict=True)]
    return [each[0] if len(set(each)) == 1 else "cond" for each in zip(*found, strict=True)]


def _scan(a: compat.ScanParts, b: compat.ScanParts, operands: list[Relation]) -> list[Relation]:
    first, second = a.num_constants, a.num_constants + a.num_carried
    constants, carried, scanned = operands[:first], operands[first:second], operands[second:]
    if not carried and set(scanned) == {0} and is_equal(a._replace(body=None, length=1), b._replace(body=None)):
        # A map over the examples: inside, everything belongs to one of them.
        results = _program(a.body, b.body, [*constants, *[SAME] * len(scanned)])
        return [0 if relation == SAME else "scan" for relation in results]
    if not is_equal(a[1:], b[1:]) or 0 in scanned:
        return ["scan"] * len(a.body.jaxpr.outvars)
    slices: list[Relation] = [axis - 1 if isinstance(axis, int) and axis != SAME else axis for axis in scanned]
    carried, found = _carried(carried, lambda carried: _program(a.body, b.body, [*constants, *carried, *slices]))
    stacked = [axis + 1 if isinstance(axis, int) and axis != SAME else axis for axis in found[a.num_carried :]]
    return [*carried, *stacked]


def _while(a: compat.WhileParts, b: compat.WhileParts, operands: list[Relation]) -> list[Relation]:
    first, second = a.num_condition_constants, a.num_condition_constants + a.num_body_constants
    if a[2:] != b[2:]:
        return ["while"] * (len(operands) - second)
    constants = operands[first:second]
    carried, _ = _carried(operands[second:], lambda carried: _program(a.body, b.body, [*constants, *carried]))
    decided = _program(a.condition, b.condition, [*operands[:first], *carried])
    return carried if decided == [SAME] else ["while"] * len(carried)


def _carried(before: list[Relation], step: Any) -> tuple[list[Relation], list[Relation]]:
    """What a loop carries stands in the same relation before and after every step, or in none; and the relations of all
    results of a step."""
    while True:
        results = step(before)
        new = [old if old == end else end if isinstance(end, str) else "scan" for old, end in zip(before, results)]  # noqa: B905
        if new == before:
            return before, results
        before = new


def _axis(a: Any, b: Any) -> int | None:
    """The one axis in which two shapes differ, of size one for a batch of one; `SAME` if they do not."""
    if len(a.shape) != len(b.shape) or a.dtype != b.dtype:
        return None
    different = [axis for axis, (m, n) in enumerate(zip(a.shape, b.shape, strict=True)) if m != n]
    if not different:
        return SAME
    return different[0] if len(different) == 1 and b.shape[different[0]] == 1 else None


def _is_same(a: Any, b: Any) -> bool:
    """Whether two constants are known to be equal."""
    if a is b:
        return True
    if not is_concrete((a, b)):
        return False
    try:
        return np.shape(a) == np.shape(b) and bool(np.all((a == b) | ((a != a) & (b != b))))
    except TypeError:
        return False
