"""The normal form of a use: a product of a matrix with vectors at several positions, perhaps in several groups."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from natgrad._program import compat
from natgrad._uses.base import Use


class NormalForm(NamedTuple):
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


def dense_form(use: Use) -> NormalForm | None:
    parts = compat.dot(use.site.eqn) if use.site.eqn is not None else None
    if parts is None:
        return None
    mine, other = use.operand, 1 - use.operand
    ranks = [len(operand.aval.shape) for operand in use.site.operands]
    free = [parts.free(k, ranks[k]) for k in (0, 1)]
    # Results have the mapped axes first, then the free ones of the left operand, then those of the right.
    num_mapped = len(parts.mapped[0])
    left = range(num_mapped, num_mapped + len(free[0]))
    right = range(num_mapped + len(free[0]), num_mapped + len(free[0]) + len(free[1]))
    outputs, positions = (left, right) if mine == 0 else (right, left)
    groups, shared = use.loop_axes
    loops, own = len(use.site.loops), len(use.value.loops)
    at = lambda axes: shifted(axes, loops)
    at_own = lambda axes: shifted(axes, own)

    return NormalForm(
        other,
        lambda x: arrange(x, groups + at(parts.mapped[other]), shared + at(free[other]), at(parts.contracted[other])),
        lambda h: arrange(h, groups + at(range(num_mapped)), shared + at(positions), at(outputs)),
        lambda w: arrange(
            w, (*range(own), *at_own(parts.mapped[mine])), at_own(parts.contracted[mine]), at_own(free[mine])
        ),
        tuple(use.site.operands[other].aval.shape[axis] for axis in free[other]),
    )


def convolution_form(use: Use) -> NormalForm | None:
    eqn = use.site.eqn
    parts = compat.convolution(eqn) if eqn is not None else None
    if eqn is None or parts is None or use.operand != 1 or parts.batch_groups != 1:
        return None
    kernel, output = eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    window = tuple(kernel[axis] for axis in parts.kernel_axes[2:])
    positions = tuple(output[axis] for axis in parts.output_axes[2:])
    groups, shared = use.loop_axes
    loops, own = len(use.site.loops), len(use.value.loops)
    space = range(len(positions))

    def inputs(x):
        # (loops, images, positions, groups, window, channels)
        cut = lambda image: patches(image, parts, window, positions)
        for _ in range(loops):
            cut = jax.vmap(cut)
        seen = cut(x)
        first = loops + 1
        places = shifted(space, first)
        return arrange(
            seen,
            (*groups, first + len(space)),
            (*shared, loops, *places),
            (first + len(space) + 1, first + len(space) + 2),
        )

    def cotangents(h):
        # (loops, images, groups, outputs, positions)
        h = h.transpose(*range(loops), *shifted(parts.output_axes, loops))
        h = h.reshape(*h.shape[: loops + 1], parts.feature_groups, -1, *positions)
        return arrange(h, (*groups, loops + 1), (*shared, loops, *shifted(space, loops + 3)), (loops + 2,))

    def weight(w):
        # (loops, groups, outputs, channels, window)
        w = w.transpose(*range(own), *shifted(parts.kernel_axes, own))
        w = w.reshape(*w.shape[:own], parts.feature_groups, -1, w.shape[own + 1], *window)
        return arrange(w, range(own + 1), (*shifted(space, own + 3), own + 2), (own + 1,))

    return NormalForm(0, inputs, cotangents, weight, (output[parts.output_axes[0]], *positions))


def patches(x: Any, parts: compat.ConvolutionParts, window: tuple[int, ...], positions: tuple[int, ...]) -> Any:
    """What the kernel sees at each position: (images, positions..., groups, entries of the window, channels).

    Put together from one strided slice for each entry of the window, which XLA does better than a convolution with
    an identity."""
    x = x.transpose(parts.input_axes[0], *parts.input_axes[2:], parts.input_axes[1])
    edges = [
        (low, high, dilation - 1) for (low, high), dilation in zip(parts.padding, parts.input_dilation, strict=True)
    ]
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
    slices = []
    for entry in np.ndindex(*window):
        start = [k * dilation for k, dilation in zip(entry, parts.kernel_dilation, strict=True)]
        stop = [s + (n - 1) * stride + 1 for s, n, stride in zip(start, positions, parts.strides, strict=True)]
        limits = (x.shape[0], *stop, x.shape[-1])
        slices.append(jax.lax.slice(x, (0, *start, 0), limits, (1, *parts.strides, 1)))
    seen = jnp.stack(slices, axis=-2)
    count = math.prod(window)
    seen = seen.reshape(*seen.shape[:-2], count, parts.feature_groups, -1)
    return seen.swapaxes(-3, -2)


class LookupForm(NamedTuple):
    r"""How to see one use of a table as reading rows: the gradient for one example has $\sum_{t: i_t = v} h_t$ in
    row $v$. An index that reads nothing is given as the number of rows."""

    input: int
    indices: Callable[[Any], Any]
    cotangents: Callable[[Any], Any]
    weight: Callable[[Any], Any]
    places: tuple[int, ...]


def lookup_form(use: Use) -> LookupForm | None:
    eqn = use.site.eqn
    parts = compat.lookup(eqn) if eqn is not None else None
    groups, shared = use.loop_axes
    if eqn is None or parts is None or use.operand != 0 or groups:
        return None
    num_rows = eqn.invars[0].aval.shape[0]
    rank, loops = len(eqn.outvars[0].aval.shape), len(shared)
    places = tuple(axis for axis in range(rank) if axis not in parts.row_axes)

    def indices(x):
        rows = (x if parts.component is None else x[..., parts.component]).reshape(-1)
        if parts.drops_outside:
            return jnp.where((rows >= 0) & (rows < num_rows), rows, num_rows)
        return jnp.clip(rows, 0, num_rows - 1)

    return LookupForm(
        1,
        indices,
        lambda h: arrange(h, (*shared, *shifted(places, loops)), shifted(parts.row_axes, loops)),
        lambda w: w.reshape(1, num_rows, -1),
        tuple(eqn.outvars[0].aval.shape[axis] for axis in places),
    )
