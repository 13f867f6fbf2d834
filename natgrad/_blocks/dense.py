from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad._blocks.base import Assignment
from natgrad._operator.dense import DenseBlock
from natgrad._per_example.blocks import rows_of
from natgrad._per_example.chunks import summed
from natgrad._sites.layers import Units
from natgrad._sites.routes import Route


@dataclass(frozen=True, eq=False)
class Dense(Assignment):
    """The exact block of one parameter: second moments of the gradients of examples, which are formed."""

    route: Route

    @property
    def structure(self):
        return "dense"

    def of_cotangents(self, recording, budget):
        rows = rows_of(recording, self.route)

        def moment(part) -> Float[Array, "P P"]:
            formed = rows.expand(part)
            flat = formed.reshape(-1, self.place.block[1])
            return flat.T @ flat

        return summed(moment, rows.data, rows.chunk(budget))

    def block(self, inputs, cotangents):
        return DenseBlock(cotangents[None])


@dataclass(frozen=True, eq=False)
class ScaleAndShift(Assignment):
    """The exact block of two, for the scale and the shift of every unit."""

    units: Units
    routes: tuple[Route, Route]

    @property
    def structure(self):
        return "scale and shift"

    def of_cotangents(self, recording, budget):
        scale, shift = (rows_of(recording, route) for route in self.routes)
        entries = self.units.scale_entries, self.units.shift_entries

        def moment(part) -> Float[Array, "units 2 2"]:
            formed = scale.expand(part[0]), shift.expand(part[1])
            pairs = [rows.reshape(*rows.shape[:2], -1)[..., own] for rows, own in zip(formed, entries, strict=True)]
            both = jnp.stack(pairs, axis=-1)
            return jnp.einsum("ncui,ncuj->uij", both, both)

        chunk = min(scale.chunk(budget), shift.chunk(budget))
        return summed(moment, (scale.data, shift.data), chunk)

    def block(self, inputs, cotangents):
        return DenseBlock(cotangents)
