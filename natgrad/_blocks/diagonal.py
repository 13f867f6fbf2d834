from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from natgrad._blocks.base import Assignment
from natgrad._operator.diagonal import DiagonalBlock
from natgrad._per_example import statistics
from natgrad._sites.routes import Route


@dataclass(frozen=True, eq=False)
class Diagonal(Assignment):
    """The exact diagonal: sums of squares of the gradients of examples."""

    route: Route

    @property
    def structure(self):
        return "diagonal"

    def of_cotangents(self, recording, budget):
        return statistics.power_sum(recording, self.route, budget, power=2)

    def block(self, inputs, cotangents):
        return DiagonalBlock(cotangents.reshape(1, -1, 1))


@dataclass(frozen=True, eq=False)
class Zero(Assignment):
    """Entries that no output depends on."""

    dtype: Any

    @property
    def structure(self):
        return "zero"

    def of_cotangents(self, recording, budget):
        return ()

    def block(self, inputs, cotangents):
        return DiagonalBlock(jnp.zeros(self.place.block, self.dtype))
