r"""Weights that are products of parameters, $W = W_0 + P Q$, such as LoRA.

For the factor $P$, the inputs are the inputs $a$ of the weight and the cotangents are $h Q^\top$; for the factor $Q$,
the inputs are $a P$ and the cotangents are the cotangents $h$ of the weight."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from natgrad._program import compat
from natgrad._program.values import Free, Result, Slice
from natgrad._uses.base import Use
from natgrad._uses.copies import EntryCopy, copy_of, leaf_of, source
from natgrad._uses.normal_form import NormalForm, arrange, shifted
from natgrad._uses.parameter_uses import MatrixUse, UseGroup, normal_form_of


@dataclass(frozen=True, eq=False)
class LowRankFactor:
    """A parameter as one factor of a weight.

    - `copy`: the factor as a copy of the parameter.
    - `other_factor`: the factor beside it.
    - `order`: axes of the other factor: loops, axes that the product sums over, axes that it keeps.
    - `columns`: for each output of the weight (or input), its place along the axes of the other factor that are kept.
    - `is_output`: whether the other factor stands next to the outputs of the weight."""

    copy: EntryCopy
    other_factor: Free
    order: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    columns: np.ndarray
    is_output: bool

    def matrix(self, value: Any) -> Any:
        """The other factor as a matrix, `gko` or, if it stands next to the inputs, `gkd`."""
        return arrange(value, *self.order)[:, :, self.columns]


def factor_use(use: Use, leaf: int, lengths: dict[int, int]) -> tuple[MatrixUse, np.ndarray] | None:
    """A use of a weight as a use of one of its factors, with the numbers `gdo` of the parameter's entries.

    `None` if the weight is not a product with a copy of that parameter."""
    form, product = normal_form_of(use), _find_product(use.value, leaf)
    if product is None or not isinstance(form, NormalForm):
        return None
    weight_copy = copy_of(use.value, product, lengths)
    side, parts = source(product, frozenset([leaf])), compat.dot(product.eqn)
    if weight_copy is None or not _is_simple(weight_copy) or side is None or parts is None or parts.mapped[0]:
        return None
    factor, other = product.operands[side], product.operands[1 - side]
    origin = leaf_of(factor, leaf)
    factor_copy = copy_of(factor, origin, lengths) if origin is not None else None
    if factor_copy is None or not _is_simple(factor_copy) or not factor.loops == other.loops == product.loops:
        return None
    numbers, product_entries = factor_copy.index_map(), _product_entries(weight_copy, form)
    if numbers is None or product_entries is None:
        return None
    free = [parts.free(k, len(product.operands[k].aval.shape)) for k in (0, 1)]
    num_loops = len(factor.loops)

    def order(k: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        return tuple(range(num_loops)), shifted(parts.contracted[k], num_loops), shifted(free[k], num_loops)

    # Entries of the product are numbered row by row: the free axes of the left operand, then of the right one.
    num_columns = math.prod(product.operands[1].aval.shape[axis] for axis in free[1])
    places = np.divmod(product_entries, num_columns)
    factor_places, other_places = places[side], places[1 - side]
    factor_numbers = arrange(numbers, *order(side))
    if _varies_along(factor_places, 0) and _varies_along(other_places, 1):
        entries, columns, is_output = factor_numbers[:, :, factor_places[:, 0]].swapaxes(1, 2), other_places[0], True
    elif _varies_along(factor_places, 1) and _varies_along(other_places, 0):
        entries, columns, is_output = factor_numbers[:, :, factor_places[0]], other_places[:, 0], False
    else:
        return None
    low_rank = LowRankFactor(factor_copy, other, order(1 - side), columns, is_output)
    return MatrixUse(use, form, weight_copy, low_rank=low_rank), entries


def _is_simple(copy: EntryCopy) -> bool:
    """Whether all entries of a copy are entries of its origin, times one number."""
    return copy.is_uniform and not copy.is_mixed


def _find_product(value: Free, leaf: int) -> Result | None:
    """The product behind a value that has a parameter in one of its factors, reached through copies and sums."""
    while not isinstance(value, Result) or compat.dot(value.eqn) is None:
        if isinstance(value, Slice):
            value = value.whole
            continue
        position = source(value, frozenset([leaf])) if isinstance(value, Result) else None
        if position is None:
            return None
        value = value.operands[position]  # pyright: ignore[reportAttributeAccessIssue]
    return value


def _product_entries(copy: EntryCopy, form: NormalForm) -> np.ndarray | None:
    """The number of the product's entry at each place `do` of the weight; `None` if groups differ in it."""
    numbers = copy.index_map()
    if numbers is None:
        return None
    by_group = np.asarray(form.weight(numbers))
    size = copy.origin.aval.size
    is_same = np.array_equal(by_group, by_group[:1] + size * np.arange(len(by_group))[:, None, None])
    return by_group[0] if is_same else None


def _varies_along(numbers: np.ndarray, axis: int) -> bool:
    """Whether numbers depend on one axis only, along which no two of them are equal."""
    line = np.take(numbers, 0, axis=1 - axis)
    return len(np.unique(line)) == line.size and bool(np.all(numbers == np.expand_dims(line, 1 - axis)))


def group_of(uses: tuple[Use, ...], leaf: int, lengths: dict[int, int]) -> tuple[UseGroup, np.ndarray] | None:
    """All uses of a parameter as a factor of weights, with the numbers `gdo` of its entries.

    `None` if it has another use, or if uses see its entries in different places."""
    factor_uses = [factor_use(use, leaf, lengths) for use in uses]
    known = [pair for pair in factor_uses if pair is not None]
    if not known or len(known) < len(factor_uses):
        return None
    members, entries = zip(*known, strict=True)
    if any(not np.array_equal(entries[0], numbers) for numbers in entries[1:]):
        return None
    return UseGroup(members, ()), entries[0]
