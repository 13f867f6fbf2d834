"""The normal form of a use: a product of a matrix with vectors at several positions, perhaps in several groups."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Layout(NamedTuple):
    r"""How to see one use of a weight as $y_{gto} = \sum_d a_{gtd}\,w_{gdo}$, so that its gradient for one example is
    $\sum_t a_{gtd}\,h_{gto}$ with the cotangent $h$ of $y$.

    Groups `g` have weights of their own; positions `t` share them. Each function takes the values of one example as
    they stand in the program, with the axes of the loops in front, and puts their axes in this order. `places` are the
    sizes of the axes that positions run over, after those of the loops."""

    input: int
    inputs: Callable[[Any], Any]
    cotangents: Callable[[Any], Any]
    weight: Callable[[Any], Any]
    places: tuple[int, ...]


def arrange(x: Any, *groups: Sequence[int]) -> Any:
    """The axes of `x` in the given order, with each group of them merged into one."""
    shape = [math.prod(x.shape[axis] for axis in group) for group in groups]
    return x.transpose([axis for group in groups for axis in group]).reshape(shape)


def shifted(axes: Sequence[int], by: int) -> tuple[int, ...]:
    return tuple(axis + by for axis in axes)
