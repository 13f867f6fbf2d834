"""Whether a model may couple examples, read off its program without running it.

The program of a batch is compared with the program of a batch of one, equation by equation. Some values have an axis
along which the examples stand, of size one in the second program. If every equation maps slices along that axis to
slices, then the output for each example is what the program of a batch of one computes for it. An equation without a
rule counts as coupling, so a model passes only if it cannot couple examples; a model that does not pass may still be
sound."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from natgrad._check import is_concrete
from natgrad._program import compat
from natgrad._program.slices import SAME, EquationPair, is_equal, keeps_slices

# How a value of the batch relates to its counterpart in a batch of one: the axis along which its slices are the values
# for single examples; `SAME` if the two are equal; else the name of the primitive that may have coupled examples.
Relation: TypeAlias = int | str


def find_coupling(batch: compat.ClosedJaxpr, single: compat.ClosedJaxpr, axes: Sequence[int | None]) -> str:
    """The primitive by which the program of a batch may couple examples; an empty string if it cannot.

    `axes` are the axes of the examples in the inputs, `None` for inputs that examples share. In the outputs examples
    must stand along the first axis."""
    relations = _compare_programs(batch, single, [SAME if axis is None else axis for axis in axes])
    if all(relation == 0 for relation in relations):
        return ""
    return next((relation for relation in relations if isinstance(relation, str)), "output")


def _compare_programs(
    batch: compat.ClosedJaxpr, single: compat.ClosedJaxpr, inputs: Sequence[Relation]
) -> list[Relation]:
    """The relations between the results of two programs, from the relations between their inputs."""
    batch_jaxpr, single_jaxpr = batch.jaxpr, single.jaxpr
    counts = [(len(p.jaxpr.eqns), len(p.constants), len(p.jaxpr.outvars)) for p in (batch, single)]
    if counts[0] != counts[1]:
        return ["model"] * len(batch_jaxpr.outvars)
    # The counterpart of every variable is kept too: the programs may have the same equations, but use other variables.
    counterparts: dict[Any, tuple[Any, Relation]] = {}
    counterparts.update(zip(batch_jaxpr.invars, zip(single_jaxpr.invars, inputs, strict=True), strict=True))
    constants = zip(batch_jaxpr.constvars, single_jaxpr.constvars, batch.constants, single.constants, strict=True)
    for a, b, *values in constants:
        counterparts[a] = b, SAME if _is_same(*values) else "constant"

    def relation(a: Any, b: Any) -> Relation:
        if compat.is_literal(a) or compat.is_literal(b):
            is_same = compat.is_literal(a) and compat.is_literal(b) and _is_same(a.val, b.val)
            return SAME if is_same else "constant"
        counterpart, known_relation = counterparts[a]
        return known_relation if counterpart is b else "model"

    for a, b in zip(batch_jaxpr.eqns, single_jaxpr.eqns, strict=True):
        if compat.name(a) != compat.name(b) or len(a.invars) != len(b.invars) or len(a.outvars) != len(b.outvars):
            return ["model"] * len(batch_jaxpr.outvars)
        results = _compare_equations(a, b, list(map(relation, a.invars, b.invars)))
        counterparts.update(zip(a.outvars, zip(b.outvars, results, strict=True), strict=True))
    return list(map(relation, batch_jaxpr.outvars, single_jaxpr.outvars))


def _compare_equations(a: compat.Equation, b: compat.Equation, operands: list[Relation]) -> list[Relation]:
    """The relations between the results of two equations with the same primitive."""
    coupling = next((operand for operand in operands if isinstance(operand, str)), None)
    if coupling is not None:
        return [coupling] * len(a.outvars)
    inner = _compare_inner_programs(a, b, operands)
    if inner is not None:
        return inner
    operand_axes: list[int] = [operand for operand in operands if isinstance(operand, int)]
    result_axes = [_example_axis(x.aval, y.aval) for x, y in zip(a.outvars, b.outvars, strict=True)]
    if set(operand_axes) <= {SAME} and set(result_axes) <= {SAME}:
        is_same = EquationPair(a, b, operand_axes, operand_axes).agrees()
        return [SAME if is_same else compat.name(a)] * len(result_axes)
    known_axes = [axis for axis in result_axes if axis is not None and axis != SAME]
    keeps = len(known_axes) == len(result_axes) and keeps_slices(EquationPair(a, b, operand_axes, known_axes))
    return list(known_axes) if keeps else [compat.name(a)] * len(result_axes)


def _compare_inner_programs(a: compat.Equation, b: compat.Equation, operands: list[Relation]) -> list[Relation] | None:
    """The relations between the results of calls, loops and conditions; `None` for other equations."""
    readers_and_rules = (
        (compat.any_call, _compare_programs),
        (compat.scan, _compare_scans),
        (compat.while_loop, _compare_while_loops),
        (compat.branches, _compare_branches),
    )
    for read, compare in readers_and_rules:
        batch_parts, single_parts = read(a), read(b)
        if batch_parts is not None and single_parts is not None:
            return compare(batch_parts, single_parts, operands)  # pyright: ignore[reportArgumentType]
    return None


def _compare_branches(
    batch: list[compat.ClosedJaxpr], single: list[compat.ClosedJaxpr], operands: list[Relation]
) -> list[Relation]:
    """Coupled, unless all examples take the same branch."""
    if operands[0] != SAME or len(batch) != len(single):
        return ["cond"] * len(batch[0].jaxpr.outvars)
    by_branch = [_compare_programs(*pair, operands[1:]) for pair in zip(batch, single, strict=True)]
    return [relations[0] if len(set(relations)) == 1 else "cond" for relations in zip(*by_branch, strict=True)]


def _compare_scans(batch: compat.ScanParts, single: compat.ScanParts, operands: list[Relation]) -> list[Relation]:
    """A scan over the examples must be a map; any other scan must not run along their axis."""
    first, second = batch.num_constants, batch.num_constants + batch.num_carried
    constants, carried, scanned = operands[:first], operands[first:second], operands[second:]
    is_map = not carried and set(scanned) == {0}
    if is_map and is_equal(batch._replace(body=None, length=1), single._replace(body=None)):
        # A map over the examples: inside, everything belongs to one of them.
        results = _compare_programs(batch.body, single.body, [*constants, *[SAME] * len(scanned)])
        return [0 if relation == SAME else "scan" for relation in results]
    if not is_equal(batch[1:], single[1:]) or 0 in scanned:
        return ["scan"] * len(batch.body.jaxpr.outvars)
    slices = [_shift_axis(relation, -1) for relation in scanned]

    def step(carried: list[Relation]) -> list[Relation]:
        return _compare_programs(batch.body, single.body, [*constants, *carried, *slices])

    carried, results = _invariant(carried, step)
    return [*carried, *(_shift_axis(relation, 1) for relation in results[batch.num_carried :])]


def _shift_axis(relation: Relation, by: int) -> Relation:
    """The relation where an axis in front is added or taken away."""
    return relation + by if isinstance(relation, int) and relation != SAME else relation


def _compare_while_loops(
    batch: compat.WhileParts, single: compat.WhileParts, operands: list[Relation]
) -> list[Relation]:
    """Coupled, unless all examples take the same number of steps."""
    first, second = batch.num_condition_constants, batch.num_condition_constants + batch.num_body_constants
    if batch[2:] != single[2:]:
        return ["while"] * (len(operands) - second)
    constants = operands[first:second]

    def step(carried: list[Relation]) -> list[Relation]:
        return _compare_programs(batch.body, single.body, [*constants, *carried])

    carried, _ = _invariant(operands[second:], step)
    condition = _compare_programs(batch.condition, single.condition, [*operands[:first], *carried])
    return carried if condition == [SAME] else ["while"] * len(carried)


def _invariant(
    carried: list[Relation], step: Callable[[list[Relation]], list[Relation]]
) -> tuple[list[Relation], list[Relation]]:
    """The relations of carried values that hold before and after every step of a loop, `"scan"` where none does; and
    the relations of all results of such a step."""
    while True:
        results = step(carried)
        after = results[: len(carried)]
        new = [
            old if old == end else end if isinstance(end, str) else "scan"
            for old, end in zip(carried, after, strict=True)
        ]
        if new == carried:
            return carried, results
        carried = new


def _example_axis(a: Any, b: Any) -> int | None:
    """The axis of the examples: where the shapes for a batch and for a batch of one differ. `SAME` if they are equal,
    `None` if they differ otherwise."""
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
