"""Which structure each parameter gets: by rule, or as the user says."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Array

from natgrad import _tree
from natgrad._block.base import AbstractEstimator, column_of
from natgrad._block.entries import BlockEntries, part
from natgrad._block.kronecker import KroneckerEstimator
from natgrad._block.masks import check_masks, masks_of
from natgrad._block.rules import STRUCTURES, BlockRules
from natgrad._block.unfactored import DenseEstimator, DiagonalEstimator, ScaleShiftEstimator, ZeroEstimator
from natgrad._block.weight_factors import WeightFactors
from natgrad._check import caller
from natgrad._program.trace import Program
from natgrad._tree import check_paths, option_for
from natgrad._uses.layers import Layer, OtherParameter, ScaleShift, Weight, find_layers
from natgrad._uses.parameter_uses import ParameterUses

FACTORED = STRUCTURES[:2]
UNUSED = "no output depends on it"


def choose(
    program: Program,
    parameters: Sequence[ParameterUses],
    rules: BlockRules,
    masks: Mapping[str, Array],
    *,
    corrected: bool,
) -> list[AbstractEstimator]:
    """Blocks that cover every entry of every parameter once, with all its uses. Weights have a Kronecker product,
    `corrected` or not, unless the rules say otherwise."""
    check_paths(dict(rules.structures), program.names, "structures")
    chooser = Chooser(program, parameters, rules, masks, corrected)
    layers = find_layers(program, parameters)
    _check_uses(layers, parameters)
    weights = [program.names[layer.leaf] for layer in layers if isinstance(layer, Weight)]
    check_masks(masks, program.names, weights)
    found = {one.place: one for layer in layers for one in chooser.assign(layer)}
    covered = list(found.values())
    covered += chooser.uncovered(covered)
    return sorted(covered, key=lambda estimator: min(estimator.leaves))


@dataclass(frozen=True)
class Chooser:
    program: Program
    parameters: Sequence[ParameterUses]
    rules: BlockRules
    masks: Mapping[str, Array]
    corrected: bool

    def assign(self, layer: Layer) -> list[AbstractEstimator]:
        match layer:
            case Weight():
                return self._weight(layer)
            case ScaleShift():
                return self._units(layer)
            case OtherParameter():
                return [self._alone(layer.leaf, layer.reason)]

    def _weight(self, weight: Weight) -> list[AbstractEstimator]:
        asked = {leaf: self._asked(leaf) for leaf in (weight.leaf, *(bias.leaf for bias in weight.biases))}
        plain = [bias for bias in weight.biases if asked[bias.leaf] in (None, *FACTORED)]
        is_plain = asked[weight.leaf] in (None, *FACTORED)
        joined = plain[0] if plain and is_plain and self.rules.bias == "joint" else None
        masks = masks_of(self.masks, weight, self.program)
        found = []
        if is_plain:
            parts = [self._part(weight.leaf, weight.entries)]
            if joined is not None:
                parts.append(self._part(joined.leaf, joined.entries[:, None]))
            found.append(
                self._kronecker(BlockEntries(tuple(parts)), WeightFactors(weight, joined), masks, asked[weight.leaf])
            )
        else:
            found.append(self._alone(weight.leaf, ""))
        for bias in weight.biases:
            if bias is joined:
                continue
            if bias in plain:
                place = BlockEntries((self._part(bias.leaf, bias.entries[:, None]),))
                view = WeightFactors(weight, bias, is_bias=True)
                found.append(self._kronecker(place, view, masks, asked[bias.leaf]))
            else:
                found.append(self._alone(bias.leaf, ""))
        return found

    def _kronecker(
        self, place: BlockEntries, view: WeightFactors, masks: dict, asked: str | None
    ) -> KroneckerEstimator:
        sizes = place.block[1:]
        sides, reasons = [], []
        for size, name in zip(sizes, ("inputs", "outputs"), strict=True):
            # One-hot rows have a diagonal moment, whatever their number.
            is_exact = name == "inputs" and bool(view.weight.group.lookups) and not view.weight.group.members
            side = 1 if is_exact else self._side(size)
            sides.append(side)
            if side < size and not is_exact:
                kind = "diagonal" if side == 1 else f"blocks of {side}"
                reasons.append(f"{size} {name} are more than `max_factor={self.rules.max_factor}`: {kind}")
        reason = "; ".join(reasons)
        is_corrected = self.corrected if asked is None else asked == "eigenvalue-corrected"
        shape = sides[0], sides[1]
        return KroneckerEstimator(place, reason, bool(reasons), view, shape, self.rules.sharing, masks, is_corrected)

    def _side(self, size: int) -> int:
        if size <= self.rules.max_factor:
            return size
        if self.rules.oversized == "diagonal":
            return 1
        return next(side for side in range(self.rules.max_factor, 0, -1) if size % side == 0)

    def _units(self, units: ScaleShift) -> list[AbstractEstimator]:
        leaves = units.scale, units.shift
        if any(self._asked(leaf) is not None for leaf in leaves):
            return [self._alone(leaf, "") for leaf in leaves]
        entries = units.scale_entries, units.shift_entries
        parts = [self._part(leaf, own[:, None, None]) for leaf, own in zip(leaves, entries, strict=True)]
        return [
            ScaleShiftEstimator(
                BlockEntries(tuple(parts)), "", False, units, (self.parameters[leaves[0]], self.parameters[leaves[1]])
            )
        ]

    def _alone(self, leaf: int, reason: str) -> AbstractEstimator:
        """A parameter by itself: dense if it is small, which is exact, and otherwise diagonal."""
        struct, parameter, asked = self.program.param_structs[leaf], self.parameters[leaf], self._asked(leaf)
        place = column_of(leaf, struct.shape)
        if not parameter.uses or 0 in struct.shape:
            return ZeroEstimator(place, UNUSED, False, _tree.wide(struct))
        is_entrywise = not reason and _is_entrywise(parameter, struct)
        reason = "it acts entry by entry" if is_entrywise else reason or f"used by `{parameter.uses[0].site.primitive}`"
        if asked in FACTORED:
            raise ValueError(
                f"{caller()}: `{self.program.names[leaf]}` cannot have a Kronecker structure, because {reason}. "
                "Choose 'dense' or 'diagonal' for it."
            )
        if asked == "dense" or (asked is None and math.prod(struct.shape) <= self.rules.max_dense):
            return DenseEstimator(place, "", False, parameter)
        if asked == "diagonal":
            return DiagonalEstimator(place, "", False, parameter)
        return DiagonalEstimator(place, reason, not is_entrywise, parameter)

    def uncovered(self, found: Sequence[AbstractEstimator]) -> list[AbstractEstimator]:
        """Entries that no block covers, because no use has them. That every other entry is covered once is checked."""
        zeros = []
        for leaf, struct in enumerate(self.program.param_structs):
            is_covered = np.zeros(int(np.prod(struct.shape, dtype=int)), bool)
            parts = [part for one in found for part in one.place.parts if part.leaf == leaf]
            for own in parts:
                is_covered[own.entries.numbers_of()] = True
            assert sum(math.prod(own.block) for own in parts) == np.sum(is_covered), "an entry is in two blocks"
            missing = np.flatnonzero(~is_covered).astype(np.int32)
            if missing.size:
                place = BlockEntries((self._part(leaf, missing.reshape(1, -1, 1)),))
                zeros.append(ZeroEstimator(place, UNUSED, False, _tree.wide(struct)))
        return zeros

    def _asked(self, leaf: int) -> str | None:
        return option_for(dict(self.rules.structures), self.program.names[leaf])

    def _part(self, leaf: int, entries: np.ndarray) -> Any:
        return part(leaf, tuple(self.program.param_structs[leaf].shape), entries)


def _is_entrywise(parameter: ParameterUses, struct: Any) -> bool:
    """Whether a parameter has one entry for every unit, or is only ever added. Products with a matrix, entry by entry,
    may be the first half of a product of matrices that is written out."""
    is_vector = sum(size > 1 for size in struct.shape) <= 1
    return is_vector or all(use.site.primitive in ("add", "sub", "add_any", "output") for use in parameter.uses)


def _check_uses(layers: Sequence[Layer], parameters: Sequence[ParameterUses]) -> None:
    """Every use of a weight or a bias must have been seen."""
    seen: Counter[int] = Counter()
    for weight in layers:
        if isinstance(weight, Weight):
            seen[weight.leaf] += len(weight.group.members) + len(weight.group.lookups)
            seen.update({bias.leaf: len(bias.members) for bias in weight.biases})
    missed = [leaf for leaf, count in seen.items() if count != len(parameters[leaf].uses)]
    assert not missed, f"uses of the parameters {missed} were lost"
