"""All uses of a parameter, grouped by the entries that they use.

A use is in normal form if it is a product with a matrix or reads rows of a table, and the matrix is a copy of the
parameter. If all uses are, per-example statistics need no per-example gradients. Otherwise the gradients are formed,
a few examples at a time, from the derivative of each site, which exists for any equation."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from natgrad._program.plan import Site
from natgrad._uses import normal_form
from natgrad._uses.base import Use
from natgrad._uses.copies import EntryCopy, copy_of, leaf_of
from natgrad._uses.normal_form import LookupForm, NormalForm


@dataclass(frozen=True, eq=False)
class MatrixUse:
    """A use in normal form.

    - `copy`: the weight of the normal form as a copy of the parameter (or of a product with it).
    - `is_swapped`: whether the weight is the transpose of the weight of the group's reference.
    - `low_rank`: a `LowRankFactor`, if the parameter is one factor of the weight."""

    use: Use
    form: NormalForm | LookupForm
    copy: EntryCopy
    is_swapped: bool = False
    low_rank: Any = None

    def positions(self, lengths: dict[int, int]) -> tuple[int, ...]:
        """The sizes of the axes over which the positions of the use run."""
        loops = self.use.site.loops
        return (*(lengths[loops[axis]] for axis in self.use.loop_axes[1]), *self.form.places)


@dataclass(frozen=True, eq=False)
class UseGroup:
    """Uses of the same entries of a parameter: products (`members`) and look-ups.

    The positions of the group are the positions of all its uses, so products between different uses are counted."""

    members: tuple[MatrixUse, ...]
    lookups: tuple[MatrixUse, ...]

    @property
    def reference(self) -> MatrixUse:
        """The use whose orientation is the orientation of the group."""
        return next(member for member in (*self.lookups, *self.members) if not member.is_swapped)


@dataclass(frozen=True, eq=False)
class ParameterUses:
    """All uses of one parameter.

    - `groups`: its uses in normal form; empty if the gradient of every example has to be formed.
    - `reason`: why there are no groups.
    - `kinds`: the name of the rule for each use: dense, convolution, lookup, local."""

    leaf: int
    uses: tuple[Use, ...]
    groups: tuple[UseGroup, ...] = ()
    reason: str = ""
    kinds: tuple[str, ...] = ()

    @property
    def acts_on_entries(self) -> bool:
        """Whether gradients are no larger than the activations on which the parameter acts."""
        is_small = (use.value.aval.size <= max(aval.size for aval in use.site.avals) for use in self.uses)
        return set(self.kinds) <= {"local"} and all(is_small)


def uses_of(sites: Sequence[Site], leaf: int) -> list[Use]:
    """The operands of sites that carry a gradient to a parameter."""
    uses = [Use(site, operand) for site in sites for operand in site.meeting]
    return [use for use in uses if leaf in use.value.leaves]


def find_uses(uses: Sequence[Use], leaf: int, lengths: dict[int, int]) -> ParameterUses:
    """Bring all uses of a parameter to normal form and group them, or say why that cannot be done."""
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
    groups_or_reason = _group(members)
    if isinstance(groups_or_reason, str):
        return ParameterUses(leaf, uses, (), groups_or_reason, kinds)
    return ParameterUses(leaf, uses, groups_or_reason, "", kinds)


def normal_form_of(use: Use) -> NormalForm | LookupForm | None:
    return normal_form.dense_form(use) or normal_form.convolution_form(use) or normal_form.lookup_form(use)


def kind(use: Use) -> str:
    """The name of the rule for a use."""
    if normal_form.dense_form(use) is not None:
        return "dense"
    if normal_form.convolution_form(use) is not None:
        return "convolution"
    return "lookup" if normal_form.lookup_form(use) is not None else "local"


def _group(members: list[MatrixUse]) -> tuple[UseGroup, ...] | str:
    """Uses of a parameter grouped by their entries, or why that cannot be done.

    Two uses belong together if their weights have the same entries, one perhaps as the transpose of the other."""
    if not members:
        return ()
    # The usual case, decided without the numbers of entries, which take memory for large weights.
    if len(members) == 1 and members[0].copy.is_plain:
        return (_orient([(members[0], None)]),)
    if (
        len(members) > 1
        and any(member.copy.is_scaled for member in members)
        and len({member.use.value for member in members}) > 1
    ):
        return "several uses, some of them scaled"
    index_maps = [member.copy.index_map() for member in members]
    if any(index_map is None for index_map in index_maps):
        return "which entries are used is not known before the program runs"
    groups: list[list[tuple[MatrixUse, np.ndarray]]] = []
    is_taken = np.zeros(math.prod(members[0].copy.origin.aval.shape), bool)
    for member, index_map in zip(members, index_maps, strict=True):
        numbers = member.form.weight(index_map)
        entries = numbers[numbers >= 0]
        if not member.copy.is_plain and np.max(np.bincount(entries), initial=0) > 1:
            return "entries are repeated in the weight"
        same = [
            group for group in groups if _is_same(group[0][1], numbers) or _is_same(group[0][1], numbers.swapaxes(1, 2))
        ]
        if same:
            same[0].append((member, numbers))
        elif np.any(is_taken[entries]):
            return "uses overlap in part"
        else:
            groups.append([(member, numbers)])
            is_taken[entries] = True
    oriented = [_orient(group) for group in groups]
    if any(member.is_swapped for group in oriented for member in group.lookups):
        return "a table is looked up by rows and by columns"
    return tuple(oriented)


def _orient(group: list) -> UseGroup:
    """A group of uses, given with the numbers of their entries, in the orientation of the first look-up or use."""
    # Rows of a table have to stay rows, while a product can be read in both directions.
    lookups = [numbers for member, numbers in group if isinstance(member.form, LookupForm)]
    reference = lookups[0] if lookups else group[0][1]
    oriented = [
        replace(member, is_swapped=numbers is not None and not _is_same(reference, numbers))
        for member, numbers in group
    ]
    return UseGroup(
        tuple(member for member in oriented if not isinstance(member.form, LookupForm)),
        tuple(member for member in oriented if isinstance(member.form, LookupForm)),
    )


def _is_same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(a, b)
