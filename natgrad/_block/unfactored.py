"""Blocks without Kronecker factors and their estimators: dense, scale and shift, diagonal, zero."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad._block.base import AbstractBlock, AbstractEstimator, reciprocal, to_unit_diagonal
from natgrad._block.eigen import EigenBlock
from natgrad._point import statistics
from natgrad._point.records import summed
from natgrad._point.statistics import rows_of
from natgrad._uses.layers import ScaleShift
from natgrad._uses.parameter_uses import ParameterUses


class DenseBlock(AbstractBlock):
    """One symmetric matrix for every group, on its `n = d o` entries. For a scale and a shift, each unit is a group."""

    matrix: Float[Array, "g n n"]

    def mv(self, v):
        flat = v.reshape(len(v), -1)
        return jnp.einsum("gnm,gm->gn", self.matrix, flat).reshape(v.shape)

    def as_matrix(self):
        return self.matrix

    def diagonal(self):
        return jnp.diagonal(self.matrix, axis1=-2, axis2=-1)[:, :, None]

    def matrices(self):
        return [self.matrix]

    def eigenvalues(self, eigen):
        return eigen[0].values[:, :, None]

    def function(self, eigen, f):
        ((values, vectors),) = eigen
        output_basis = jnp.ones((len(vectors), 1, 1, 1), vectors.dtype)
        return EigenBlock(vectors[:, None], output_basis, f(values)[:, :, None])

    def inverted(self, inverses, damping):
        return DenseBlock(*inverses)

    def with_unit_diagonal(self):
        return DenseBlock(to_unit_diagonal(self.matrix))


class DiagonalBlock(AbstractBlock):
    """A diagonal matrix: one number for every entry."""

    values: Float[Array, "g d o"]

    def mv(self, v):
        return self.values * v

    def as_matrix(self):
        return jax.vmap(jnp.diag)(self.values.reshape(len(self.values), -1))

    def diagonal(self):
        return self.values

    def matrices(self):
        return []

    def eigenvalues(self, eigen):
        return self.values

    def function(self, eigen, f):
        return DiagonalBlock(f(self.values))

    def inverted(self, inverses, damping):
        return DiagonalBlock(reciprocal(self.values + damping.astype(self.values.dtype)))

    def with_unit_diagonal(self):
        return DiagonalBlock((self.values > 0).astype(self.values.dtype))


@dataclass(frozen=True, eq=False)
class DenseEstimator(AbstractEstimator):
    r"""The exact block of one parameter, $\frac1N\sum_n g_n g_n^\top$. Per-example gradients $g_n$ are formed."""

    parameter: ParameterUses

    @property
    def structure(self):
        return "dense"

    def of_cotangents(self, recording, budget):
        rows = rows_of(recording, self.parameter)

        def moment(chunk) -> Float[Array, "P P"]:
            gradients = rows.expand(chunk).reshape(-1, self.place.block[1])
            return gradients.T @ gradients

        return summed(moment, rows.data, rows.chunk(budget))

    def block(self, inputs, cotangents):
        return DenseBlock(cotangents[None])


@dataclass(frozen=True, eq=False)
class ScaleShiftEstimator(AbstractEstimator):
    """The exact second moments of (scale, shift) for every unit: 2 x 2 matrices. Per-example gradients are formed."""

    units: ScaleShift
    parameters: tuple[ParameterUses, ParameterUses]

    @property
    def structure(self):
        return "scale and shift"

    def of_cotangents(self, recording, budget):
        scale, shift = (rows_of(recording, parameter) for parameter in self.parameters)
        entries = self.units.scale_entries, self.units.shift_entries

        def moment(chunk) -> Float[Array, "units 2 2"]:
            gradients = scale.expand(chunk[0]), shift.expand(chunk[1])
            by_unit = [g.reshape(*g.shape[:2], -1)[..., numbers] for g, numbers in zip(gradients, entries, strict=True)]
            pairs = jnp.stack(by_unit, axis=-1)
            return jnp.einsum("ncui,ncuj->uij", pairs, pairs)

        chunk_size = min(scale.chunk(budget), shift.chunk(budget))
        return summed(moment, (scale.data, shift.data), chunk_size)

    def block(self, inputs, cotangents):
        return DenseBlock(cotangents)


@dataclass(frozen=True, eq=False)
class DiagonalEstimator(AbstractEstimator):
    r"""The exact diagonal, $\frac1N\sum_n g_n^2$."""

    parameter: ParameterUses

    @property
    def structure(self):
        return "diagonal"

    def of_cotangents(self, recording, budget):
        return statistics.power_sum(recording, self.parameter, budget, power=2)

    def block(self, inputs, cotangents):
        return DiagonalBlock(cotangents.reshape(1, -1, 1))


@dataclass(frozen=True, eq=False)
class ZeroEstimator(AbstractEstimator):
    """A block of zeros, for entries on which no output depends."""

    dtype: Any

    @property
    def structure(self):
        return "zero"

    def of_cotangents(self, recording, budget):
        return ()

    def block(self, inputs, cotangents):
        return DiagonalBlock(jnp.zeros(self.place.block, self.dtype))
