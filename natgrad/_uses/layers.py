"""From routes to layers: which parameters act as a weight, which are its bias, which scale and shift the same units.

Nothing is matched against a pattern. A weight is a parameter whose uses have a normal form; a bias is one that is added
to the results of a weight's uses, wherever that happens, so that it has the same cotangents; scale and shift are
parameters that multiply and are added to the same units."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from natgrad._program.trace import Program
from natgrad._uses import low_rank
from natgrad._uses.base import Use
from natgrad._uses.copies import EntryCopy, copy_of, leaf_of
from natgrad._uses.flow import SUMS, DataFlow, Origin
from natgrad._uses.parameter_uses import MatrixUse, ParameterUses, UseGroup

Numbers = np.ndarray


@dataclass(frozen=True, eq=False)
class Rectangle:
    """The groups, inputs and outputs of a normal form that belong to a parameter."""

    groups: Numbers
    inputs: Numbers
    outputs: Numbers


@dataclass(frozen=True, eq=False)
class BiasUse:
    """A parameter, as it is added to the result of one use of a weight: a copy, perhaps times a number, or taken
    away."""

    member: MatrixUse
    copy: EntryCopy
    is_subtracted: bool


@dataclass(frozen=True, eq=False)
class Bias:
    """A parameter that is added to the results of some uses of a weight. `entries` are the numbers of its entries, for
    every group and output."""

    leaf: int
    added: tuple[BiasUse, ...]
    entries: Numbers

    @property
    def members(self) -> tuple[MatrixUse, ...]:
        return tuple(one.member for one in self.added)


@dataclass(frozen=True, eq=False)
class Weight:
    """Entries of a parameter that act as matrices: `entries` are their numbers `gdo`. `selection` is `None` where
    these are all that the normal form has."""

    leaf: int
    group: UseGroup
    entries: Numbers
    selection: Rectangle | None
    biases: tuple[Bias, ...] = ()

    @property
    def upright(self) -> tuple[MatrixUse, ...]:
        return tuple(member for member in self.group.members if not member.is_swapped)

    @property
    def swapped(self) -> tuple[MatrixUse, ...]:
        return tuple(member for member in self.group.members if member.is_swapped)

    @property
    def is_factor(self) -> bool:
        """Whether it is one factor of a weight that is a product."""
        return any(member.through is not None for member in self.group.members)


@dataclass(frozen=True, eq=False)
class ScaleShift:
    """A scale and a shift, with the numbers of their entries unit by unit."""

    scale: int
    shift: int
    scale_entries: Numbers
    shift_entries: Numbers


@dataclass(frozen=True, eq=False)
class OtherParameter:
    """A parameter that belongs to no layer, and why (no reason: it acts entry by entry, or not at all)."""

    leaf: int
    reason: str


Layer = Weight | ScaleShift | OtherParameter


def find_layers(program: Program, parameters: Sequence[ParameterUses]) -> list[Layer]:
    """The layers of a model. Every parameter is in one of them at least, with all its uses."""
    flow = DataFlow(program.plan)
    weights: list[Weight] = []
    reasons: dict[int, str] = {}
    for parameter in parameters:
        found = _weights(parameter, program.lengths)
        if isinstance(found, str):
            reasons[parameter.leaf] = found
        else:
            weights += found
    others = [parameter for parameter in parameters if not any(parameter.leaf == weight.leaf for weight in weights)]
    for parameter in others:
        # A bias goes with a weight, or else with the factor that stands next to the outputs.
        for k, weight in sorted(enumerate(weights), key=lambda pair: pair[1].is_factor):
            shift = _shift(program, flow, parameter, weight)
            if shift is not None:
                weights[k] = replace(weight, biases=(*weight.biases, shift))
                break
    taken = {bias.leaf for weight in weights for bias in weight.biases}
    others = [parameter for parameter in others if parameter.leaf not in taken]
    units = _all_units(program, flow, others)
    taken |= {leaf for one in units for leaf in (one.scale, one.shift)}
    rest = [
        OtherParameter(parameter.leaf, reasons.get(parameter.leaf, ""))
        for parameter in others
        if parameter.leaf not in taken
    ]
    return [*weights, *units, *rest]


def _weights(parameter: ParameterUses, lengths: dict[int, int]) -> list[Weight] | str:
    """The matrices in a parameter, or why it has none (an empty reason: nothing of the kind is to be expected)."""
    if not parameter.groups:
        product = low_rank.group_of(parameter.uses, parameter.leaf, lengths)
        if product is not None:
            return [Weight(parameter.leaf, *product, None)]
        return "" if parameter.acts_on_entries else parameter.reason
    found = []
    for group in parameter.groups:
        reference = group.reference
        if any(member.copy.is_scaled and not member.copy.is_uniform for member in (*group.members, *group.lookups)):
            return "the weight is scaled, not everywhere alike"
        numbers = reference.copy.index_map()
        if numbers is None:
            return "which entries are used is not known before the program runs"
        entries = np.asarray(reference.form.weight(numbers))
        selection = _selection(entries)
        if selection is None:
            return "its entries are not a rectangle of the weight"
        if selection.groups.size == 0:
            continue
        is_whole = tuple(map(len, (selection.groups, selection.inputs, selection.outputs))) == entries.shape
        entries = entries[np.ix_(selection.groups, selection.inputs, selection.outputs)]
        found.append(Weight(parameter.leaf, group, entries, None if is_whole else selection))
    return found or "none of its entries is used"


def _selection(entries: Numbers) -> Rectangle | None:
    """The rectangle that holds the entries of a parameter (those not -1) and no others."""
    mine = entries >= 0
    groups, inputs, outputs = (np.flatnonzero(mine.any(axes)) for axes in ((1, 2), (0, 2), (0, 1)))
    return Rectangle(groups, inputs, outputs) if mine[np.ix_(groups, inputs, outputs)].all() else None


def _shift(program: Program, flow: DataFlow, parameter: ParameterUses, weight: Weight) -> Bias | None:
    """The parameter as one that is added to results of a weight, if that is all it does."""
    if not parameter.uses or weight.group.lookups:
        return None
    if any(member.through is not None and member.through.is_output for member in weight.group.members):
        return None
    added: list[BiasUse] = []
    entries = None
    for use in parameter.uses:
        is_sum = use.site.primitive in SUMS or (use.site.primitive == "sub" and use.operand == 1)
        found = _copied(program, use, parameter.leaf) if is_sum else None
        if found is None or not found[0].is_uniform:
            return None
        copy, numbers = found
        beside = use.site.operands[1 - use.operand]
        found = [
            (member, _per_output(source, member, numbers, weight.selection))
            for source in flow.sources(beside)
            for member in weight.upright
            if source.site is member.use.site and source.site.loops == use.site.loops
        ]
        taken = [one.member for one in added]
        found = [(member, outputs) for member, outputs in found if outputs is not None and member not in taken]
        if not found or (entries is not None and not np.array_equal(entries, found[0][1])):
            return None
        added.append(BiasUse(found[0][0], copy, use.site.primitive == "sub"))
        entries = found[0][1]
    assert entries is not None
    return Bias(parameter.leaf, tuple(added), entries)


def _per_output(source: Origin, member: MatrixUse, numbers: Numbers, selection: Rectangle | None) -> Numbers | None:
    """Which entry of a shift is added to each output of a use, if that is so at all positions, and no entry twice."""
    placed = np.asarray(member.form.cotangents(source.carried_back(numbers)))
    first = placed[:, 0]
    if not np.array_equal(placed, np.broadcast_to(first[:, None], placed.shape)):
        return None
    own = first if selection is None else first[np.ix_(selection.groups, selection.outputs)]
    is_all = own.min() >= 0 and np.sum(first >= 0) == own.size
    return own if is_all and len(np.unique(own)) == own.size else None


def _copied(program: Program, use: Use, leaf: int) -> tuple[EntryCopy, Numbers] | None:
    """The value of a use as a copy of a parameter, and for every entry of the result of its site (loops in front) the
    number of the parameter's entry that meets it, -1 for none."""
    origin = leaf_of(use.value, leaf)
    copy = copy_of(use.value, origin, program.lengths) if origin is not None else None
    numbers = copy.index_map() if copy is not None else None
    if copy is None or numbers is None or len(use.site.avals) != 1:
        return None
    own, loops = use.value.loops, use.site.loops
    shape = use.site.avals[0].shape
    rank = len(shape) - len(use.value.aval.shape)
    lead = [program.lengths[loop] if loop in own else 1 for loop in loops]
    placed = numbers.reshape(*lead, *(1,) * rank, *use.value.aval.shape)
    return copy, np.broadcast_to(placed, (*(program.lengths[loop] for loop in loops), *shape))


def _all_units(program: Program, flow: DataFlow, parameters: Sequence[ParameterUses]) -> list[ScaleShift]:
    """Pairs of a scale and a shift, each used once."""
    by_site = {parameter.uses[0].site: parameter for parameter in parameters if len(parameter.uses) == 1}
    scales = {site: parameter for site, parameter in by_site.items() if site.primitive == "mul"}
    found, taken = [], set()
    for site, parameter in by_site.items():
        if site.primitive not in SUMS | {"sub"} or len(site.operands) != 2:
            continue
        beside = site.operands[1 - parameter.uses[0].operand]
        for source in flow.sources(beside, is_scaled=True):
            scale = scales.get(source.site)
            if scale is None or scale.leaf in taken or source.site.loops != site.loops:
                continue
            pair = _units(program, scale, parameter, source)
            if pair is not None:
                found.append(pair)
                taken.add(scale.leaf)
                break
    return found


def _units(program: Program, scale: ParameterUses, shift: ParameterUses, source: Origin) -> ScaleShift | None:
    copies = [_copied(program, parameter.uses[0], parameter.leaf) for parameter in (scale, shift)]
    if copies[0] is None or copies[1] is None:
        return None
    pairs = np.unique(np.stack([source.carried(copies[0][1]).reshape(-1), copies[1][1].reshape(-1)]), axis=1)
    is_one_to_one = all(len(np.unique(side)) == pairs.shape[1] for side in pairs)
    return ScaleShift(scale.leaf, shift.leaf, pairs[0], pairs[1]) if is_one_to_one and pairs.min() >= 0 else None
