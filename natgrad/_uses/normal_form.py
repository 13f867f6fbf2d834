r"""The normal form of a use: $y_{gto} = \sum_d a_{gtd}\,w_{gdo}$, a product with a matrix at several positions.

Axes are `g` groups, which have different matrices; `t` positions, which share them; `d` inputs; `o` outputs. Dense
layers and convolutions have this form (a convolution has one position for each place of the kernel); a look-up of rows
in a table has a form of its own."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from natgrad._program import compat
from natgrad._uses.base import Use


class NormalForm(NamedTuple):
    r"""One use of a weight as $y_{gto} = \sum_d a_{gtd}\,w_{gdo}$. Its gradient for one example is
    $\sum_t a_{gtd}\,h_{gto}$ with the cotangent $h$ of $y$.

    - `input`: the position of the operand that holds the inputs.
    - `inputs`, `cotangents`, `weight`: functions that bring arrays of one example, as they are in the program with the
      axes of loops in front, to the axes `gtd`, `gto` and `gdo`.
    - `places`: the sizes of the axes over which positions run, after the loops."""

    input: int
    inputs: Callable[[Any], Any]
    cotangents: Callable[[Any], Any]
    weight: Callable[[Any], Any]
    places: tuple[int, ...]


def arrange(x: Any, *groups: Sequence[int]) -> Any:
    """Transpose the axes of `x` into the given order, and merge each group of them into one axis."""
    shape = [math.prod(x.shape[axis] for axis in group) for group in groups]
    return x.transpose([axis for group in groups for axis in group]).reshape(shape)


def shifted(axes: Sequence[int], by: int) -> tuple[int, ...]:
    return tuple(axis + by for axis in axes)


def dense_form(use: Use) -> NormalForm | None:
    """The normal form of an operand of `dot_general`: mapped axes are groups, free axes of the other are positions."""
    parts = compat.dot(use.site.eqn) if use.site.eqn is not None else None
    if parts is None:
        return None
    weight_side, input_side = use.operand, 1 - use.operand
    free = [parts.free(k, len(operand.aval.shape)) for k, operand in enumerate(use.site.operands)]
    # Results have the mapped axes first, then the free axes of the left operand, then the free axes of the right.
    num_mapped = len(parts.mapped[0])
    left = range(num_mapped, num_mapped + len(free[0]))
    right = range(num_mapped + len(free[0]), num_mapped + len(free[0]) + len(free[1]))
    outputs, positions = (left, right) if weight_side == 0 else (right, left)
    groups, shared = use.loop_axes
    num_loops, num_weight_loops = len(use.site.loops), len(use.value.loops)

    def inputs(x):
        mapped, contracted = parts.mapped[input_side], parts.contracted[input_side]
        return arrange(
            x,
            groups + shifted(mapped, num_loops),
            shared + shifted(free[input_side], num_loops),
            shifted(contracted, num_loops),
        )

    def cotangents(h):
        mapped = range(num_mapped)
        return arrange(
            h,
            groups + shifted(mapped, num_loops),
            shared + shifted(positions, num_loops),
            shifted(outputs, num_loops),
        )

    def weight(w):
        mapped, contracted = parts.mapped[weight_side], parts.contracted[weight_side]
        return arrange(
            w,
            (*range(num_weight_loops), *shifted(mapped, num_weight_loops)),
            shifted(contracted, num_weight_loops),
            shifted(free[weight_side], num_weight_loops),
        )

    places = tuple(use.site.operands[input_side].aval.shape[axis] for axis in free[input_side])
    return NormalForm(input_side, inputs, cotangents, weight, places)


def convolution_form(use: Use) -> NormalForm | None:
    """The normal form of the kernel of a convolution: groups of features are groups, places of the kernel positions."""
    eqn = use.site.eqn
    parts = compat.convolution(eqn) if eqn is not None else None
    if eqn is None or parts is None or use.operand != 1 or parts.batch_groups != 1:
        return None
    kernel, output = eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    window = tuple(kernel[axis] for axis in parts.kernel_axes[2:])
    positions = tuple(output[axis] for axis in parts.output_axes[2:])
    groups, shared = use.loop_axes
    num_loops, num_weight_loops = len(use.site.loops), len(use.value.loops)
    space = range(len(positions))

    def inputs(x):
        cut: Callable = lambda images: patches(images, parts, window, positions)
        for _ in range(num_loops):
            cut = jax.vmap(cut)
        # (loops, images, positions, groups, window, channels)
        images, after_positions = num_loops, num_loops + 1 + len(space)
        return arrange(
            cut(x),
            (*groups, after_positions),
            (*shared, images, *shifted(space, images + 1)),
            (after_positions + 1, after_positions + 2),
        )

    def cotangents(h):
        h = h.transpose(*range(num_loops), *shifted(parts.output_axes, num_loops))
        # (loops, images, groups, outputs, positions)
        images = num_loops
        h = h.reshape(*h.shape[: images + 1], parts.feature_groups, -1, *positions)
        return arrange(h, (*groups, images + 1), (*shared, images, *shifted(space, images + 3)), (images + 2,))

    def weight(w):
        w = w.transpose(*range(num_weight_loops), *shifted(parts.kernel_axes, num_weight_loops))
        # (loops, groups, outputs, channels, window)
        first = num_weight_loops
        w = w.reshape(*w.shape[:first], parts.feature_groups, -1, w.shape[first + 1], *window)
        return arrange(w, range(first + 1), (*shifted(space, first + 3), first + 2), (first + 1,))

    return NormalForm(0, inputs, cotangents, weight, (output[parts.output_axes[0]], *positions))


def patches(x: Any, parts: compat.ConvolutionParts, window: tuple[int, ...], positions: tuple[int, ...]) -> Any:
    """The patch of the input under the kernel at each position: (images, positions..., groups, window, channels).

    Stacked from one strided slice for each entry of the window, because `jax.lax.conv_general_dilated_patches`
    multiplies with an identity: patches of 3 by 3 entries of 32 images with 16 by 16 positions and 8 channels take
    0.4 ms instead of 2.3 ms, for 0.15 s more to compile (JAX 0.10.1, CPU). Reproduced by
    `test_patches_are_a_product_with_an_identity`."""
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
    stacked = jnp.stack(slices, axis=-2)
    by_group = stacked.reshape(*stacked.shape[:-2], math.prod(window), parts.feature_groups, -1)
    return by_group.swapaxes(-3, -2)


class LookupForm(NamedTuple):
    r"""One use of a table as reading its rows $i_t$. The gradient for one example has $\sum_{t: i_t = v} h_t$ in row
    $v$.

    - `input`: the position of the operand that holds the indices.
    - `indices`, `cotangents`, `weight`: functions to the axes `t`, `to` and `gdo` with one group; `d` counts rows. An
      index that reads no row is given as the number of rows.
    - `places`: the sizes of the axes over which positions run, after the loops."""

    input: int
    indices: Callable[[Any], Any]
    cotangents: Callable[[Any], Any]
    weight: Callable[[Any], Any]
    places: tuple[int, ...]


def lookup_form(use: Use) -> LookupForm | None:
    """The form of a table whose rows are read."""
    eqn = use.site.eqn
    parts = compat.lookup(eqn) if eqn is not None else None
    groups, shared = use.loop_axes
    if eqn is None or parts is None or use.operand != 0 or groups:
        return None
    num_rows = eqn.invars[0].aval.shape[0]
    shape, num_loops = eqn.outvars[0].aval.shape, len(shared)
    position_axes = tuple(axis for axis in range(len(shape)) if axis not in parts.row_axes)

    def indices(x):
        rows = (x if parts.component is None else x[..., parts.component]).reshape(-1)
        if parts.drops_outside:
            return jnp.where((rows >= 0) & (rows < num_rows), rows, num_rows)
        return jnp.clip(rows, 0, num_rows - 1)

    def cotangents(h):
        return arrange(h, (*shared, *shifted(position_axes, num_loops)), shifted(parts.row_axes, num_loops))

    def weight(w):
        return w.reshape(1, num_rows, -1)

    return LookupForm(1, indices, cotangents, weight, tuple(shape[axis] for axis in position_axes))
