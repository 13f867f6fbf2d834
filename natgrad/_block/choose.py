"""Choose a structure for every parameter, from its role in the model and from the user's `BlockRules`."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Array

from natgrad import _tree
from natgrad._block.base import AbstractEstimator, column_of
from natgrad._block.entries import BlockEntries, LeafEntries, leaf_entries
from natgrad._block.kronecker import KroneckerEstimator
from natgrad._block.masks import check_masks, masks_of
from natgrad._block.rules import STRUCTURES, BlockRules
from natgrad._block.unfactored import DenseEstimator, DiagonalEstimator, ScaleShiftEstimator, ZeroEstimator
from natgrad._block.weight_factors import Masks, WeightFactors
from natgrad._check import caller
from natgrad._program import compat
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
    """Estimators of blocks that together cover every entry of every parameter once, with all its uses.

    Weights get Kronecker products, with `corrected` eigenvalues or without, unless the rules say otherwise."""
    check_paths(dict(rules.structures), program.names, "structures")
    chooser = Chooser(program, parameters, rules, masks, corrected)
    layers = find_layers(program, parameters)
    _check_uses(layers, parameters)
    weights = [program.names[layer.leaf] for layer in layers if isinstance(layer, Weight)]
    check_masks(masks, program.names, weights)
    # A parameter that holds several matrices is several layers. If it is dense or diagonal, all give the same block.
    by_place = {estimator.place: estimator for layer in layers for estimator in chooser.estimators(layer)}
    estimators = [*by_place.values(), *chooser.zero_estimators(list(by_place.values()))]
    return sorted(estimators, key=lambda estimator: min(estimator.leaves))


@dataclass(frozen=True)
class Chooser:
    """The choice of estimators for the layers of one program."""

    program: Program
    parameters: Sequence[ParameterUses]
    rules: BlockRules
    masks: Mapping[str, Array]
    corrected: bool

    def estimators(self, layer: Layer) -> list[AbstractEstimator]:
        """The estimators for all parameters of a layer."""
        match layer:
            case Weight():
                return self._for_weight(layer)
            case ScaleShift():
                return self._for_scale_shift(layer)
            case OtherParameter():
                return [self._for_parameter(layer.leaf, layer.reason)]

    def _for_weight(self, weight: Weight) -> list[AbstractEstimator]:
        """Kronecker products for a weight and its biases, except for those with another structure in the rules."""
        masks = masks_of(self.masks, weight, self.program)
        is_factored = self._is_factored(weight.leaf)
        factored_biases = [bias for bias in weight.biases if self._is_factored(bias.leaf)]
        is_joint = self.rules.bias == "joint" and is_factored and bool(factored_biases)
        joint_bias = factored_biases[0] if is_joint else None
        estimators: list[AbstractEstimator] = []
        if is_factored:
            rows = [self._entries(weight.leaf, weight.entries)]
            if joint_bias is not None:
                rows.append(self._entries(joint_bias.leaf, joint_bias.entries[:, None]))
            estimators.append(self._kronecker(BlockEntries(tuple(rows)), WeightFactors(weight, joint_bias), masks))
        else:
            estimators.append(self._for_parameter(weight.leaf, ""))
        for bias in weight.biases:
            if bias is joint_bias:
                continue
            if bias in factored_biases:
                place = BlockEntries((self._entries(bias.leaf, bias.entries[:, None]),))
                estimators.append(self._kronecker(place, WeightFactors(weight, bias, is_bias=True), masks))
            else:
                estimators.append(self._for_parameter(bias.leaf, ""))
        return estimators

    def _kronecker(self, place: BlockEntries, view: WeightFactors, masks: Masks) -> KroneckerEstimator:
        """A Kronecker product, in which factors larger than `max_factor` are diagonal or block-diagonal."""
        sizes = place.block[1:]
        sides, reasons = [], []
        for size, name in zip(sizes, ("inputs", "outputs"), strict=True):
            # The second moment of one-hot rows is diagonal, however many rows there are.
            is_exact = name == "inputs" and bool(view.weight.group.lookups) and not view.weight.group.members
            side = 1 if is_exact else self._side(size)
            sides.append(side)
            if side < size and not is_exact:
                kind = "diagonal" if side == 1 else f"blocks of {side}"
                reasons.append(f"{size} {name} are more than `max_factor={self.rules.max_factor}`: {kind}")
        requested = self._requested(place.parts[0].leaf)
        return KroneckerEstimator(
            place,
            "; ".join(reasons),
            bool(reasons),
            view=view,
            sides=(sides[0], sides[1]),
            sharing=self.rules.sharing,
            masks=masks,
            is_corrected=self.corrected if requested is None else requested == "eigenvalue-corrected",
        )

    def _side(self, size: int) -> int:
        """The size of the blocks in a factor of the given size."""
        if size <= self.rules.max_factor:
            return size
        if self.rules.oversized == "diagonal":
            return 1
        return next(side for side in range(self.rules.max_factor, 0, -1) if size % side == 0)

    def _for_scale_shift(self, units: ScaleShift) -> list[AbstractEstimator]:
        """One block of 2 x 2 matrices for a scale and a shift, unless the rules have a structure for one of them."""
        if any(self._requested(leaf) is not None for leaf in (units.scale, units.shift)):
            return [self._for_parameter(leaf, "") for leaf in (units.scale, units.shift)]
        scale_rows = self._entries(units.scale, units.scale_entries[:, None, None])
        shift_rows = self._entries(units.shift, units.shift_entries[:, None, None])
        parameters = self.parameters[units.scale], self.parameters[units.shift]
        return [ScaleShiftEstimator(BlockEntries((scale_rows, shift_rows)), "", False, units, parameters)]

    def _for_parameter(self, leaf: int, reason: str) -> AbstractEstimator:
        """A block for one parameter: dense, which is exact, if it is small, and otherwise diagonal."""
        struct, parameter, requested = self.program.param_structs[leaf], self.parameters[leaf], self._requested(leaf)
        place = column_of(leaf, struct.shape)
        if not parameter.uses or 0 in struct.shape:
            return ZeroEstimator(place, UNUSED, False, _tree.wide(struct))
        is_entrywise = not reason and _is_entrywise(parameter, struct)
        reason = "it acts entry by entry" if is_entrywise else reason or f"used by `{parameter.uses[0].site.primitive}`"
        if requested in FACTORED:
            raise ValueError(
                f"{caller()}: `{self.program.names[leaf]}` cannot have a Kronecker structure, because {reason}. "
                "Choose 'dense' or 'diagonal' for it."
            )
        if requested == "dense" or (requested is None and math.prod(struct.shape) <= self.rules.max_dense):
            return DenseEstimator(place, "", False, parameter)
        if requested == "diagonal":
            return DiagonalEstimator(place, "", False, parameter)
        return DiagonalEstimator(place, reason, not is_entrywise, parameter)

    def zero_estimators(self, estimators: Sequence[AbstractEstimator]) -> list[AbstractEstimator]:
        """Blocks of zeros for the entries that no use has, and so no estimator covers."""
        zeros = []
        for leaf, struct in enumerate(self.program.param_structs):
            is_covered = np.zeros(int(np.prod(struct.shape, dtype=int)), bool)
            all_entries = (entries for estimator in estimators for entries in estimator.place.parts)
            covering = [entries for entries in all_entries if entries.leaf == leaf]
            for entries in covering:
                is_covered[entries.entries.index()] = True
            num_covered = sum(math.prod(entries.block) for entries in covering)
            assert num_covered == np.sum(is_covered), "an entry is in two blocks"
            missing = np.flatnonzero(~is_covered).astype(np.int32)
            if missing.size:
                place = BlockEntries((self._entries(leaf, missing.reshape(1, -1, 1)),))
                zeros.append(ZeroEstimator(place, UNUSED, False, _tree.wide(struct)))
        return zeros

    def _requested(self, leaf: int) -> str | None:
        """The structure that the rules have for a parameter."""
        return option_for(dict(self.rules.structures), self.program.names[leaf])

    def _is_factored(self, leaf: int) -> bool:
        return self._requested(leaf) in (None, *FACTORED)

    def _entries(self, leaf: int, numbers: np.ndarray) -> LeafEntries:
        return leaf_entries(leaf, tuple(self.program.param_structs[leaf].shape), numbers)


def _is_entrywise(parameter: ParameterUses, struct: Any) -> bool:
    """Whether a parameter acts entry by entry: it is a vector, or it is only added.

    A matrix that multiplies entry by entry does not count: with a sum after it, that may be a product of matrices."""
    is_vector = sum(size > 1 for size in struct.shape) <= 1
    return is_vector or all(use.site.primitive in compat.SUMS_AND_DIFFERENCES | {"output"} for use in parameter.uses)


def _check_uses(layers: Sequence[Layer], parameters: Sequence[ParameterUses]) -> None:
    """Assert that the layers account for every use of a weight or a bias."""
    num_uses: Counter[int] = Counter()
    for weight in layers:
        if isinstance(weight, Weight):
            num_uses[weight.leaf] += len(weight.group.members) + len(weight.group.lookups)
            num_uses.update({bias.leaf: len(bias.members) for bias in weight.biases})
    missed = [leaf for leaf, count in num_uses.items() if count != len(parameters[leaf].uses)]
    assert not missed, f"uses of the parameters {missed} were lost"
