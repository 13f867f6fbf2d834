r"""Weights that are products of parameters, $W = W_0 + P Q$: seen from $P$, inputs are those of the weight and
cotangents go through $Q$; seen from $Q$, it is the other way round."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from natgrad._program import compat
from natgrad._program.values import Free, Result, Slice
from natgrad._uses.base import Use
from natgrad._uses.copies import EntryCopy, copy_of, leaf_of, source
from natgrad._uses.normal_form import NormalForm, arrange
from natgrad._uses.parameter_uses import MatrixUse, UseGroup, normal_form_of


@dataclass(frozen=True, eq=False)
class LowRankFactor:
    """The factors of a weight: a copy of the parameter, and the other. `order` sorts the axes of the other's value:
    loops, those that are summed, the others; `columns` says to which of the others each output (or input) of the weight
    belongs."""

    own: EntryCopy
    factor: Free
    order: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
    columns: np.ndarray
    is_output: bool

    def matrix(self, value: Any) -> Any:
        """The other factor, `gko` or `gkd`."""
        return arrange(value, *self.order)[:, :, self.columns]


def seen_from(use: Use, leaf: int, lengths: dict[int, int]) -> tuple[MatrixUse, np.ndarray] | None:
    """A use of a weight as one of the parameter in it, with the numbers of the parameter's entries `gdo`; `None` if
    the weight is not a product with that parameter."""
    form, product = normal_form_of(use), _product(use.value, leaf)
    if product is None or not isinstance(form, NormalForm):
        return None
    copy = copy_of(use.value, product, lengths)
    place = source(product, frozenset([leaf]))
    parts = compat.dot(product.eqn)
    if copy is None or copy.is_mixed or not copy.is_uniform or place is None or parts is None or parts.mapped[0]:
        return None
    mine, other = product.operands[place], product.operands[1 - place]
    origin = leaf_of(mine, leaf)
    inner = copy_of(mine, origin, lengths) if origin is not None else None
    if inner is None or not inner.is_uniform or inner.is_mixed or not mine.loops == other.loops == product.loops:
        return None
    loops = len(mine.loops)
    axes = lambda k, which: tuple(axis + loops for axis in which[k])
    free = [parts.free(k, len(product.operands[k].aval.shape)) for k in (0, 1)]
    order = lambda k: (tuple(range(loops)), axes(k, parts.contracted), axes(k, free))
    numbers, weight = inner.index_map(), _weight(copy, form)
    if numbers is None or weight is None:
        return None
    rows, columns = np.divmod(
        weight, int(np.prod([product.operands[1].aval.shape[axis] for axis in free[1]], dtype=int))
    )
    own, others = (rows, columns) if place == 0 else (columns, rows)
    own_numbers = arrange(numbers, *order(place))
    through = lambda columns, is_output: LowRankFactor(inner, other, order(1 - place), columns, is_output)
    if _varies_along(own, 0) and _varies_along(others, 1):
        entries, how = own_numbers[:, :, own[:, 0]].swapaxes(1, 2), through(others[0], is_output=True)
    elif _varies_along(own, 1) and _varies_along(others, 0):
        entries, how = own_numbers[:, :, own[0]], through(others[:, 0], is_output=False)
    else:
        return None
    return MatrixUse(use, form, copy, through=how), entries


def _product(value: Free, leaf: int) -> Result | None:
    """The product that a parameter is a factor of, behind whatever copies or adds to it."""
    while not isinstance(value, Result) or compat.dot(value.eqn) is None:
        if isinstance(value, Slice):
            value = value.whole
            continue
        place = source(value, frozenset([leaf])) if isinstance(value, Result) else None
        if place is None:
            return None
        value = value.operands[place]  # pyright: ignore[reportAttributeAccessIssue]
    return value


def _weight(copy: EntryCopy, form: NormalForm) -> np.ndarray | None:
    """Which entry of the product each entry of the weight is, if that is the same in every group."""
    numbers = copy.index_map()
    if numbers is None:
        return None
    placed = np.asarray(form.weight(numbers))
    size = copy.origin.aval.size
    is_same = np.array_equal(placed, placed[:1] + size * np.arange(len(placed))[:, None, None])
    return placed[0] if is_same else None


def _varies_along(numbers: np.ndarray, axis: int) -> bool:
    """Whether numbers depend on one axis only, and no two of them along it are the same."""
    line = np.take(numbers, 0, axis=1 - axis)
    return len(np.unique(line)) == line.size and bool(np.all(numbers == np.expand_dims(line, 1 - axis)))


def group_of(uses: tuple[Use, ...], leaf: int, lengths: dict[int, int]) -> tuple[UseGroup, np.ndarray] | None:
    """All uses of a parameter as factors of weights, if that is what they are, and its entries."""
    found = [seen_from(use, leaf, lengths) for use in uses]
    if not found or any(one is None for one in found):
        return None
    members, entries = zip(*(one for one in found if one is not None), strict=True)
    if any(not np.array_equal(entries[0], other) for other in entries[1:]):
        return None
    return UseGroup(members, ()), entries[0]
