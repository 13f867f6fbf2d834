"""One use of a parameter at a site, and the universal rule: any equation can be differentiated where it stands."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from natgrad._program.plan import Site
from natgrad._uses import normal_form
from natgrad._uses.base import Use
from natgrad._uses.copies import EntryCopy, copy_of, leaf_of
from natgrad._uses.normal_form import LookupForm, NormalForm


@dataclass(frozen=True, eq=False)
class MatrixUse:
    """A use in normal form. `is_swapped`: its weight is the transpose of the others' in its group. `through`: the
    other factor, where the weight is a product of the parameter with something else."""

    use: Use
    form: NormalForm | LookupForm
    copy: EntryCopy
    is_swapped: bool = False
    through: Any = None

    def positions(self, lengths: dict[int, int]) -> tuple[int, ...]:
        """The sizes of the axes that the positions of the use run over."""
        loops = self.use.site.loops
        return (*(lengths[loops[axis]] for axis in self.use.loop_axes[1]), *self.form.places)


@dataclass(frozen=True, eq=False)
class UseGroup:
    """Uses of the same entries of a parameter, all seen in the same orientation.

    The positions of all of them together are the positions of the group, so that products between different uses
    are counted."""

    members: tuple[MatrixUse, ...]
    lookups: tuple[MatrixUse, ...]

    @property
    def reference(self) -> MatrixUse:
        """The member whose orientation is the group's."""
        upright = (member for member in (*self.lookups, *self.members) if not member.is_swapped)
        return next(upright)


@dataclass(frozen=True, eq=False)
class ParameterUses:
    """The way to one parameter: through groups of uses in normal form, or, where there are none, by forming the
    gradient of every example, a few at a time, for the `reason` given."""

    leaf: int
    uses: tuple[Use, ...]
    groups: tuple[UseGroup, ...] = ()
    reason: str = ""
    kinds: tuple[str, ...] = ()

    @property
    def acts_on_entries(self) -> bool:
        """Whether gradients are no larger than the activations that the parameter acts on."""
        is_small = (use.value.aval.size <= max(aval.size for aval in use.site.avals) for use in self.uses)
        return set(self.kinds) <= {"local"} and all(is_small)


def uses_of(sites: Sequence[Site], leaf: int) -> list[Use]:
    uses = [Use(site, operand) for site in sites for operand in site.meeting]
    return [use for use in uses if leaf in use.value.leaves]


def find_uses(uses: Sequence[Use], leaf: int, lengths: dict[int, int]) -> ParameterUses:
    """The way to a parameter from all its uses."""
    uses = tuple(uses)
    kinds = tuple(kind(use) for use in uses)
    members = []
    for use in uses:
        form = normal_form_of(use)
        if form is None:
            return ParameterUses(leaf, uses, (), f"used by `{use.site.primitive}`", kinds)
        origin = leaf_of(use.value, leaf)
        copy = copy_of(use.value, origin, lengths) if origin is not None else None
        if copy is None:
            return ParameterUses(leaf, uses, (), "the weight is computed from the parameter, not copied", kinds)
        members.append(MatrixUse(use, form, copy))
    groups = _grouped(members)
    return (
        ParameterUses(leaf, uses, (), groups, kinds)
        if isinstance(groups, str)
        else ParameterUses(leaf, uses, groups, "", kinds)
    )


def normal_form_of(use: Use) -> NormalForm | LookupForm | None:
    return normal_form.dense_form(use) or normal_form.convolution_form(use) or normal_form.lookup_form(use)


def kind(use: Use) -> str:
    """The name of the rule for a use."""
    if normal_form.dense_form(use) is not None:
        return "dense"
    if normal_form.convolution_form(use) is not None:
        return "convolution"
    return "lookup" if normal_form.lookup_form(use) is not None else "local"


def _grouped(members: list[MatrixUse]) -> tuple[UseGroup, ...] | str:
    """The uses of a parameter, sorted by the entries they use; or why that cannot be done."""
    if not members:
        return ()
    if len(members) == 1 and members[0].copy.is_plain:
        return (_group([(members[0], None)]),)
    if len(members) > 1 and any(m.copy.is_scaled for m in members) and len({m.use.value for m in members}) > 1:
        return "several uses, some of them scaled"
    maps = [member.copy.index_map() for member in members]
    if any(m is None for m in maps):
        return "which entries are used is not known before the program runs"
    normal = [member.form.weight(m) for member, m in zip(members, maps, strict=True)]
    groups: list[list[tuple[MatrixUse, np.ndarray]]] = []
    is_taken = np.zeros(math.prod(members[0].copy.origin.aval.shape), bool)
    for member, m in zip(members, normal, strict=True):
        entries = m[m >= 0]
        if not member.copy.is_plain and np.max(np.bincount(entries), initial=0) > 1:
            return "entries are repeated in the weight"
        same = [group for group in groups if _is_same(group[0][1], m) or _is_same(group[0][1], m.swapaxes(1, 2))]
        if same:
            same[0].append((member, m))
        elif np.any(is_taken[entries]):
            return "uses overlap in part"
        else:
            groups.append([(member, m)])
            is_taken[entries] = True
    found = [_group(group) for group in groups]
    if any(member.is_swapped for group in found for member in group.lookups):
        return "a table is looked up by rows and by columns"
    return tuple(found)


def _group(members: list) -> UseGroup:
    """Members with their index maps, turned to the orientation of the first look-up, or of the first member."""
    is_lookup = lambda member: isinstance(member.form, LookupForm)
    reference = next((m for member, m in members if is_lookup(member)), members[0][1])
    turned = [
        MatrixUse(member.use, member.form, member.copy, m is not None and not _is_same(reference, m))
        for member, m in members
    ]
    return UseGroup(tuple(m for m in turned if not is_lookup(m)), tuple(m for m in turned if is_lookup(m)))


def _is_same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(a, b)
