"""Examples in two parts, to train on and held out, and what the first part says about units."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


class Split(NamedTuple):
    """Which examples are trained on and which are held out."""

    training: np.ndarray
    held_out: np.ndarray


def parted(count: int, fraction: float = 0.2, seed: int = 0) -> Split:
    """Examples that are held out at random, at least one unless the fraction is zero."""
    order = np.random.default_rng(seed).permutation(count)
    size = max(1, round(fraction * count)) if fraction else 0
    return Split(np.sort(order[size:]), np.sort(order[:size]))


class Scaling(NamedTuple):
    """The mean and the standard deviation of every column."""

    mean: Any
    deviation: Any

    def standardised(self, values: np.ndarray) -> np.ndarray:
        """Values with mean zero and deviation one, and zero in the columns that do not vary."""
        varies = self.deviation > 0
        return np.where(varies, (values - self.mean) / np.where(varies, self.deviation, 1), 0)


def units(values: np.ndarray) -> Scaling:
    # The computed deviation of equal numbers need not be zero.
    deviation = np.where(np.ptp(values, axis=0) > 0, values.std(axis=0), 0)
    return Scaling(values.mean(axis=0), deviation)


LayerParams = dict[str, Float[Array, "..."]]


def normal(random: np.random.Generator, shape: tuple[int, ...], deviation: float) -> Float[Array, "..."]:
    return jnp.asarray(deviation * random.standard_normal(shape), float)


def layer(random: np.random.Generator, inputs: int, outputs: int) -> LayerParams:
    """Weights whose outputs vary as much as their inputs, and no bias."""
    return {"w": normal(random, (inputs, outputs), inputs**-0.5), "b": jnp.asarray(np.zeros(outputs), float)}


def affine(layer: LayerParams, x: Float[Array, "... inputs"]) -> Float[Array, "... outputs"]:
    return x @ layer["w"] + layer["b"]


def perceptron(sizes: tuple[int, ...], seed: int, linear: tuple[int, ...] = ()) -> tuple[Callable, list[LayerParams]]:
    """Layers with tanh between them, except after those that are `linear`, and parameters for them."""
    last = len(sizes) - 2

    def model(params, x):
        for number, each in enumerate(params):
            x = affine(each, x)
            x = x if number in (*linear, last) else jnp.tanh(x)
        return x

    random = np.random.default_rng(seed)
    return model, [layer(random, *pair) for pair in zip(sizes[:-1], sizes[1:], strict=True)]
