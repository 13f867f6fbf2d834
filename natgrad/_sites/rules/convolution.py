"""Convolutions: products of the kernel with the patch under it, at every position."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from natgrad._sites import compat
from natgrad._sites.rules.layout import Layout, arrange, shifted
from natgrad._sites.uses import Use


def layout(use: Use) -> Layout | None:
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

    return Layout(0, inputs, cotangents, weight, (output[parts.output_axes[0]], *positions))


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
