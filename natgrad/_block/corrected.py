"""EKFAC: the eigenvalues of a Kronecker block are replaced by exact second moments in its eigenbasis."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array

from natgrad._block import factor
from natgrad._block.base import AbstractEstimator
from natgrad._block.eigen import EigenBlock
from natgrad._block.factor import Factor
from natgrad._block.kronecker import KroneckerEstimator
from natgrad._block.weight_factors import indices, num_positions, operand_of, result_of
from natgrad._point.factored_rows import FactoredRows
from natgrad._point.records import SiteRecords


@dataclass(frozen=True, eq=False)
class EigenvalueEstimator(AbstractEstimator):
    r"""$S_{ij} = \frac1N\sum_n \big(Q_A^\top g_n Q_B\big)_{ij}^2$ with per-example gradients
    $g_n = \sum_t a_{nt} h_{nt}^\top$.

    With several positions $t$, gradients are formed in the basis, a few examples at a time; with one position,
    $S = (a Q_A)^{2\top} (h Q_B)^2 / N$ needs none."""

    kronecker: KroneckerEstimator
    input_basis: Factor
    output_basis: Factor

    @property
    def structure(self):
        return "eigenvalue-corrected"

    def of_cotangents(self, recording, budget):
        return self._rows(recording).power_sum(2, budget)

    def block(self, inputs, cotangents):
        return EigenBlock(self.input_basis, self.output_basis, cotangents)

    def _rows(self, recording: SiteRecords) -> FactoredRows:
        """Per-example gradients in the eigenbasis, as products of rotated inputs and cotangents."""
        view = self.kronecker.view
        members = (*view.upright, *view.swapped)
        masks = [self.kronecker.masks.get(member.use.site.number) for member in members]
        operands = [operand_of(recording, member) for member in members]
        data = operands, [result_of(recording, member) for member in members], masks
        # In uses of the transpose, cotangents are in the place of inputs. These then differ between the columns of
        # cotangents, so each column counts as an example.
        is_unfolded = bool(view.swapped)

        def input_and_cotangent(member, operand, result, mask) -> tuple[Array, Array]:
            h = view.cotangents(recording, member, result, mask)
            if member in view.weight.group.lookups:
                a = jax.nn.one_hot(indices(member, operand), member.use.value.aval.shape[0], dtype=h.dtype)[:, None]
                a = a if view.weight.selection is None else a[..., view.weight.selection.inputs]
            else:
                a = view.inputs(recording, member, operand)
            if is_unfolded:
                a = jnp.repeat(a, h.shape[1], axis=0)
                h = h.reshape(-1, 1, *h.shape[2:])
            return (h[:, 0], a[:, None]) if member.is_swapped else (a, h)

        def expand(chunk):
            pairs = [input_and_cotangent(*use) for use in zip(members, *chunk, strict=True)]
            a, h = (jnp.concatenate(side, axis=-2) for side in zip(*pairs, strict=True))
            return factor.rotated(self.input_basis, a), factor.rotated(self.output_basis, h)

        groups, inputs, outputs = self.place.block
        shape = groups, num_positions(recording, members), inputs, outputs
        return FactoredRows(data, expand, recording.num_examples, recording.num_cotangents, shape, 8)
