r"""MLPs, and the preparation of their data: splitting off held-out examples and standardising columns.

$x \mapsto W_L\tanh(\dots\tanh(W_1 x + b_1)\dots) + b_L$ with $W_{ij} \sim N(0, 1/\text{inputs})$ at the start."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float


class Split(NamedTuple):
    """Indices of the training examples and of the held-out examples."""

    training: np.ndarray
    held_out: np.ndarray


def split_examples(count: int, fraction: float = 0.2, seed: int = 0) -> Split:
    """Hold out a random fraction of the examples, at least one unless the fraction is zero."""
    order = np.random.default_rng(seed).permutation(count)
    size = max(1, round(fraction * count)) if fraction else 0
    return Split(np.sort(order[size:]), np.sort(order[:size]))


class Scaling(NamedTuple):
    """The mean and the standard deviation of every column."""

    mean: np.ndarray
    standard_deviation: np.ndarray

    def standardise(self, values: np.ndarray) -> np.ndarray:
        """Values with mean zero and standard deviation one; zero in columns that do not vary."""
        # Held-out rows may vary in a column in which the training rows do not: nothing was learned about it.
        varies = self.standard_deviation > 0
        return np.where(varies, (values - self.mean) / np.where(varies, self.standard_deviation, 1), 0)


def column_scaling(values: np.ndarray) -> Scaling:
    """The scaling that standardises these values."""
    # Rounding can make the computed standard deviation of equal numbers positive.
    standard_deviation = np.where(np.ptp(values, axis=0) > 0, values.std(axis=0), 0)
    return Scaling(values.mean(axis=0), standard_deviation)


LayerParams = dict[str, Float[Array, "..."]]


def normal(random: np.random.Generator, shape: tuple[int, ...], standard_deviation: float) -> Float[Array, "..."]:
    """Normally distributed numbers. Drawn by NumPy, so that they are equal in single and double precision."""
    return jnp.asarray(standard_deviation * random.standard_normal(shape), float)


def layer_params(random: np.random.Generator, inputs: int, outputs: int) -> LayerParams:
    r"""Weights with variance $1/\text{inputs}$, which keep the variance of the inputs, and biases of zero."""
    return {"w": normal(random, (inputs, outputs), inputs**-0.5), "b": jnp.asarray(np.zeros(outputs), float)}


def affine(layer: LayerParams, x: Float[Array, "... inputs"]) -> Float[Array, "... outputs"]:
    return x @ layer["w"] + layer["b"]


def mlp(sizes: tuple[int, ...], seed: int, linear: tuple[int, ...] = ()) -> tuple[Callable, list[LayerParams]]:
    """An MLP with tanh after every layer but the last and those numbered in `linear`, and its initial parameters."""
    last = len(sizes) - 2

    def model(params, x):
        for number, layer in enumerate(params):
            x = affine(layer, x)
            x = x if number in (*linear, last) else jnp.tanh(x)
        return x

    random = np.random.default_rng(seed)
    return model, [layer_params(random, *pair) for pair in zip(sizes[:-1], sizes[1:], strict=True)]
