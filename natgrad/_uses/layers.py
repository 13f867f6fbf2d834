"""Which parameters act as a weight, which are the bias of a weight, which scale and shift the same units.

Nothing is matched against a pattern. A weight is a parameter whose uses have a normal form. A bias is a parameter that
is added to the results of a weight's uses, wherever that happens, so that it has their cotangents. Scale and shift are
parameters that multiply the same units and are added to them.

Entries of parameters are given by their numbers: arrays `gdo` for weights, with groups `g`, inputs `d`, outputs `o`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from natgrad._program import compat
from natgrad._program.trace import Program
from natgrad._uses import low_rank
from natgrad._uses.base import Use
from natgrad._uses.copies import EntryCopy, copy_of, leaf_of
from natgrad._uses.flow import DataFlow, Origin
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
    """A bias, as it is added to the result of one use of a weight: a copy of it, perhaps times a number, or subtracted.

    `member` is the use of the weight."""

    member: MatrixUse
    copy: EntryCopy
    is_subtracted: bool


@dataclass(frozen=True, eq=False)
class Bias:
    """A parameter that is added to the results of some uses of a weight. `entries` are its numbers `go`."""

    leaf: int
    uses: tuple[BiasUse, ...]
    entries: Numbers

    @property
    def members(self) -> tuple[MatrixUse, ...]:
        """The uses of the weight to whose results the bias is added."""
        return tuple(use.member for use in self.uses)


@dataclass(frozen=True, eq=False)
class Weight:
    """Entries of a parameter that act as matrices.

    - `entries`: the numbers `gdo` of these entries.
    - `selection`: where they stand in the normal form; `None` if they fill it."""

    leaf: int
    group: UseGroup
    entries: Numbers
    selection: Rectangle | None
    biases: tuple[Bias, ...] = ()

    @property
    def upright(self) -> tuple[MatrixUse, ...]:
        """The products with the weight itself."""
        return tuple(member for member in self.group.members if not member.is_swapped)

    @property
    def swapped(self) -> tuple[MatrixUse, ...]:
        """The products with the transpose of the weight."""
        return tuple(member for member in self.group.members if member.is_swapped)

    @property
    def is_factor(self) -> bool:
        """Whether it is one factor of a weight that is a product."""
        return any(member.low_rank is not None for member in self.group.members)


@dataclass(frozen=True, eq=False)
class ScaleShift:
    """A scale and a shift of the same units, with the numbers of their entries unit by unit."""

    scale: int
    shift: int
    scale_entries: Numbers
    shift_entries: Numbers


@dataclass(frozen=True, eq=False)
class OtherParameter:
    """A parameter that belongs to no layer, and why. The reason is empty if it acts entry by entry, or not at all."""

    leaf: int
    reason: str


Layer = Weight | ScaleShift | OtherParameter


def find_layers(program: Program, parameters: Sequence[ParameterUses]) -> list[Layer]:
    """The layers of a model: every parameter is in at least one of them, with all its uses."""
    flow = DataFlow(program.plan)
    weights: list[Weight] = []
    reasons: dict[int, str] = {}
    for parameter in parameters:
        weights_or_reason = _find_weights(parameter, program.lengths)
        if isinstance(weights_or_reason, str):
            reasons[parameter.leaf] = weights_or_reason
        else:
            weights += weights_or_reason
    weight_leaves = {weight.leaf for weight in weights}
    unassigned = [parameter for parameter in parameters if parameter.leaf not in weight_leaves]
    for parameter in unassigned:
        # A bias goes with a whole weight if there is one, else with the factor of a weight next to the outputs.
        for k, weight in sorted(enumerate(weights), key=lambda pair: pair[1].is_factor):
            bias = _find_bias(program, flow, parameter, weight)
            if bias is not None:
                weights[k] = replace(weight, biases=(*weight.biases, bias))
                break
    bias_leaves = {bias.leaf for weight in weights for bias in weight.biases}
    unassigned = [parameter for parameter in unassigned if parameter.leaf not in bias_leaves]
    pairs = _find_scale_shifts(program, flow, unassigned)
    pair_leaves = {leaf for pair in pairs for leaf in (pair.scale, pair.shift)}
    others = [
        OtherParameter(parameter.leaf, reasons.get(parameter.leaf, ""))
        for parameter in unassigned
        if parameter.leaf not in pair_leaves
    ]
    return [*weights, *pairs, *others]


def _find_weights(parameter: ParameterUses, lengths: dict[int, int]) -> list[Weight] | str:
    """The matrices in a parameter, or why it has none. The reason is empty for parameters that act entry by entry."""
    if not parameter.groups:
        product = low_rank.group_of(parameter.uses, parameter.leaf, lengths)
        if product is not None:
            return [Weight(parameter.leaf, *product, None)]
        return "" if parameter.acts_on_entries else parameter.reason
    weights = []
    for group in parameter.groups:
        reference = group.reference
        if any(member.copy.is_scaled and not member.copy.is_uniform for member in (*group.members, *group.lookups)):
            return "the weight is scaled, not everywhere alike"
        numbers = reference.copy.index_map()
        if numbers is None:
            return "which entries are used is not known before the program runs"
        entries = np.asarray(reference.form.weight(numbers))
        selection = _find_rectangle(entries)
        if selection is None:
            return "its entries are not a rectangle of the weight"
        if selection.groups.size == 0:
            continue
        is_whole = tuple(map(len, (selection.groups, selection.inputs, selection.outputs))) == entries.shape
        entries = entries[np.ix_(selection.groups, selection.inputs, selection.outputs)]
        weights.append(Weight(parameter.leaf, group, entries, None if is_whole else selection))
    return weights or "none of its entries is used"


def _find_rectangle(entries: Numbers) -> Rectangle | None:
    """The rectangle that holds the entries of a parameter (numbers other than -1) and no others."""
    is_entry = entries >= 0
    groups, inputs, outputs = (np.flatnonzero(is_entry.any(axes)) for axes in ((1, 2), (0, 2), (0, 1)))
    return Rectangle(groups, inputs, outputs) if is_entry[np.ix_(groups, inputs, outputs)].all() else None


def _find_bias(program: Program, flow: DataFlow, parameter: ParameterUses, weight: Weight) -> Bias | None:
    """The parameter as a bias of a weight; `None` if it does anything else."""
    if not parameter.uses or weight.group.lookups:
        return None
    if any(member.low_rank is not None and member.low_rank.is_output for member in weight.group.members):
        return None
    bias_uses: list[BiasUse] = []
    entries = None
    for use in parameter.uses:
        is_subtracted = use.site.primitive == "sub"
        is_added = use.site.primitive in compat.SUMS or (is_subtracted and use.operand == 1)
        copied = _copied_entries(program, use, parameter.leaf) if is_added else None
        if copied is None or not copied[0].is_uniform:
            return None
        copy, numbers = copied
        taken = [bias_use.member for bias_use in bias_uses]
        candidates = [
            (member, _entries_by_output(origin, member, numbers, weight.selection))
            for origin in flow.origins(use.site.operands[1 - use.operand])
            for member in weight.upright
            if origin.site is member.use.site and origin.site.loops == use.site.loops and member not in taken
        ]
        candidates = [(member, by_output) for member, by_output in candidates if by_output is not None]
        if not candidates or (entries is not None and not np.array_equal(entries, candidates[0][1])):
            return None
        member, entries = candidates[0]
        bias_uses.append(BiasUse(member, copy, is_subtracted))
    assert entries is not None
    return Bias(parameter.leaf, tuple(bias_uses), entries)


def _entries_by_output(
    origin: Origin, member: MatrixUse, numbers: Numbers, selection: Rectangle | None
) -> Numbers | None:
    """The number `go` of the bias entry that is added to each output of a use.

    `None` if it differs between positions, or if an entry is added to several outputs."""
    by_position = np.asarray(member.form.cotangents(origin.to_result(numbers)))
    by_output = by_position[:, 0]
    if not np.array_equal(by_position, np.broadcast_to(by_output[:, None], by_position.shape)):
        return None
    selected = by_output if selection is None else by_output[np.ix_(selection.groups, selection.outputs)]
    is_all = selected.min() >= 0 and np.sum(by_output >= 0) == selected.size
    return selected if is_all and len(np.unique(selected)) == selected.size else None


def _copied_entries(program: Program, use: Use, leaf: int) -> tuple[EntryCopy, Numbers] | None:
    """The value of a use as a copy of a parameter, and for every entry of the result of its site (loops in front) the
    number of the parameter's entry that meets it, -1 for none."""
    origin = leaf_of(use.value, leaf)
    copy = copy_of(use.value, origin, program.lengths) if origin is not None else None
    numbers = copy.index_map() if copy is not None else None
    if copy is None or numbers is None or len(use.site.avals) != 1:
        return None
    loops, shape = use.site.loops, use.site.avals[0].shape
    missing_rank = len(shape) - len(use.value.aval.shape)
    lengths = [program.lengths[loop] for loop in loops]
    aligned = [length if loop in use.value.loops else 1 for loop, length in zip(loops, lengths, strict=True)]
    numbers = numbers.reshape(*aligned, *(1,) * missing_rank, *use.value.aval.shape)
    return copy, np.broadcast_to(numbers, (*lengths, *shape))


def _find_scale_shifts(program: Program, flow: DataFlow, parameters: Sequence[ParameterUses]) -> list[ScaleShift]:
    """Pairs of a scale and a shift, each used once."""
    by_site = {parameter.uses[0].site: parameter for parameter in parameters if len(parameter.uses) == 1}
    scales = {site: parameter for site, parameter in by_site.items() if site.primitive == "mul"}
    pairs, paired = [], set()
    for site, shift in by_site.items():
        if site.primitive not in compat.SUMS_AND_DIFFERENCES or len(site.operands) != 2:
            continue
        for origin in flow.origins(site.operands[1 - shift.uses[0].operand], is_scaled=True):
            scale = scales.get(origin.site)
            if scale is None or scale.leaf in paired or origin.site.loops != site.loops:
                continue
            pair = _pair(program, scale, shift, origin)
            if pair is not None:
                pairs.append(pair)
                paired.add(scale.leaf)
                break
    return pairs


def _pair(program: Program, scale: ParameterUses, shift: ParameterUses, origin: Origin) -> ScaleShift | None:
    """A scale and a shift with their entries unit by unit; `None` unless every unit has one entry of each."""
    scaled = _copied_entries(program, scale.uses[0], scale.leaf)
    shifted = _copied_entries(program, shift.uses[0], shift.leaf)
    if scaled is None or shifted is None:
        return None
    entries = np.unique(np.stack([origin.to_value(scaled[1]).reshape(-1), shifted[1].reshape(-1)]), axis=1)
    is_one_to_one = all(len(np.unique(side)) == entries.shape[1] for side in entries)
    return ScaleShift(scale.leaf, shift.leaf, *entries) if is_one_to_one and entries.min() >= 0 else None
