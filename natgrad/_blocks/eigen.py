"""Blocks with corrected eigenvalues: the basis of a Kronecker product, and in it the exact second moments."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array

from natgrad._blocks.base import Assignment
from natgrad._blocks.kronecker import Kronecker
from natgrad._blocks.uses import num_positions
from natgrad._operator import factor
from natgrad._operator.eigen import EigenBlock
from natgrad._operator.factor import Factor
from natgrad._per_example import factored
from natgrad._per_example.factored import Factors
from natgrad._per_example.recording import Recording


@dataclass(frozen=True, eq=False)
class Corrected(Assignment):
    r"""$S_{ij} = \frac1N\sum_n \big(Q_A^\top g_n Q_G\big)_{ij}^2$ with the gradients $g_n$ of examples, which are
    formed in the basis, a few at a time, or not at all where there is one position."""

    kronecker: Kronecker
    input_basis: Factor
    output_basis: Factor

    @property
    def structure(self):
        return "eigenvalue-corrected"

    def of_cotangents(self, recording, budget):
        return factored.power_sum(self._factors(recording), 2, budget)

    def block(self, inputs, cotangents):
        return EigenBlock(self.input_basis, self.output_basis, cotangents)

    def _factors(self, recording: Recording) -> Factors:
        view = self.kronecker.view
        members = (*view.upright, *view.swapped)
        data = view.data(recording, members, self.kronecker.masks)
        # Inputs and cotangents that change places differ between cotangents, which then count as examples.
        is_unfolded = bool(view.swapped)

        def pair(member, own) -> tuple[Array, Array]:
            h = view.cotangents(recording, member, own)
            if member in view.weight.group.lookups:
                a = jax.nn.one_hot(view.indices(member, own), member.use.value.aval.shape[0], dtype=h.dtype)[:, None]
                a = a if view.weight.selection is None else a[..., view.weight.selection.inputs]
            else:
                a = view.inputs(recording, member, own)
            if is_unfolded:
                a = jnp.repeat(a, h.shape[1], axis=0)
                h = h.reshape(-1, 1, *h.shape[2:])
            return (h[:, 0], a[:, None]) if member.is_swapped else (a, h)

        def expand(part):
            pairs = [pair(member, own) for member, own in zip(members, part, strict=True)]
            a, h = (jnp.concatenate(side, axis=-2) for side in zip(*pairs, strict=True))
            return factor.rotated(self.input_basis, a), factor.rotated(self.output_basis, h)

        groups, inputs, outputs = self.place.block
        positions = sum(num_positions(member, own) for member, own in zip(members, data, strict=True))
        shape = groups, positions, inputs, outputs
        return Factors(data, expand, recording.num_examples, recording.num_cotangents, shape, 8)
