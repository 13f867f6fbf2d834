"""Examples in two parts, to train on and held out, and what the first part says about units."""

from typing import Any, NamedTuple

import numpy as np


class Parts(NamedTuple):
    """Which examples are trained on and which are held out."""

    training: np.ndarray
    held_out: np.ndarray


def parted(count: int, fraction: float = 0.2, seed: int = 0) -> Parts:
    """Examples that are held out at random, at least one unless the fraction is zero."""
    order = np.random.default_rng(seed).permutation(count)
    size = max(1, round(fraction * count)) if fraction else 0
    return Parts(np.sort(order[size:]), np.sort(order[:size]))


class Units(NamedTuple):
    """The mean and the standard deviation of every column."""

    mean: Any
    deviation: Any

    def standardised(self, values: np.ndarray) -> np.ndarray:
        """Values with mean zero and deviation one, and zero in the columns that do not vary."""
        varies = self.deviation > 0
        return np.where(varies, (values - self.mean) / np.where(varies, self.deviation, 1), 0)


def units(values: np.ndarray) -> Units:
    # The computed deviation of equal numbers need not be zero.
    deviation = np.where(np.ptp(values, axis=0) > 0, values.std(axis=0), 0)
    return Units(values.mean(axis=0), deviation)
