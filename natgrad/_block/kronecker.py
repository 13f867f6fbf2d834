r"""K-FAC: blocks $A \otimes B$, where $A$ is the second moment of inputs and $B$ the second moment of cotangents.

Array letters: `n` examples, `c` columns of cotangents of each, `g` groups, `t` positions, `d` inputs, `o` outputs.
Positions of all uses of a weight stand one after the other along `t`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from natgrad import _tree
from natgrad._block import factor
from natgrad._block.base import AbstractBlock, AbstractEstimator, to_unit_diagonal
from natgrad._block.eigen import EigenBlock
from natgrad._block.factor import Factor
from natgrad._block.weight_factors import Masks, WeightFactors, indices, num_positions, operand_of, result_of
from natgrad._point.records import MemoryBudget, SiteRecords, summed
from natgrad._uses.parameter_uses import MatrixUse


class KroneckerBlock(AbstractBlock):
    r"""The Kronecker product $A \otimes B$ of two symmetric factors, which maps a matrix $V$ to $A V B$. The literature
    often calls $B$ by the letter $G$.

    Its inverse is $A^{-1} \otimes B^{-1}$."""

    A: Factor
    B: Factor

    def mv(self, v):
        return factor.sandwich(self.A, v, self.B)

    def as_matrix(self):
        return jax.vmap(jnp.kron)(factor.as_matrix(self.A), factor.as_matrix(self.B))

    def diagonal(self):
        return factor.diagonal(self.A)[:, :, None] * factor.diagonal(self.B)[:, None, :]

    def matrices(self):
        return [self.A, self.B]

    def eigenvalues(self, eigen):
        inputs, outputs = map(factor.values, eigen)
        return inputs[:, :, None] * outputs[:, None, :]

    def function(self, eigen, f):
        return EigenBlock(eigen[0].vectors, eigen[1].vectors, f(self.eigenvalues(eigen)))

    @property
    def is_product(self):
        return True

    def inverted(self, inverses, damping):
        return KroneckerBlock(*inverses)

    def with_unit_diagonal(self):
        return KroneckerBlock(to_unit_diagonal(self.A), to_unit_diagonal(self.B))


# For the number of each site, whether some cotangent of a position is not zero.
Live = dict[int, Bool[Array, "n t"]]


class SecondMoments(NamedTuple):
    """A second moment over the uses of a weight, and one over the uses of its transpose, if there are any."""

    upright: Factor
    swapped: Factor | None


class CotangentMoments(NamedTuple):
    """Second moments of cotangents; and for the number of each site, how many cotangents of a position are not zero."""

    moments: SecondMoments
    num_live: dict[int, Float[Array, "n t"]]


@dataclass(frozen=True, eq=False)
class KroneckerEstimator(AbstractEstimator):
    """The block of a weight, perhaps with its bias.

    - `sides`: the sizes of the blocks within each factor.
    - `sharing`: how positions that share the weight are treated, as in `BlockRules`.
    - `is_corrected`: whether an `EigenvalueEstimator` is to replace the eigenvalues.

    Inputs at positions whose cotangents are all zero do not count, since no output depends on them: padding, for
    example."""

    view: WeightFactors
    sides: tuple[int, int]
    sharing: str
    masks: Masks
    is_corrected: bool

    @property
    def structure(self):
        return "kronecker"

    def of_cotangents(self, recording, budget):
        upright = self._cotangents(recording, self.view.upright, self.sides[1], budget)
        swapped = self.view.swapped
        moments = SecondMoments(
            upright, self._cotangents(recording, swapped, self.sides[0], budget) if swapped else None
        )
        members = (*self.view.upright, *swapped)
        num_live = {member.use.site.number: self._num_live(recording, member) for member in members}
        return CotangentMoments(moments, num_live)

    def of_inputs(self, recording, cotangents, budget):
        are_live = {number: count > 0 for number, count in cotangents.num_live.items()}
        upright = self._inputs(recording, self.view.upright, are_live, self.sides[0], budget)
        swapped = self.view.swapped
        return SecondMoments(
            upright, self._inputs(recording, swapped, are_live, self.sides[1], budget) if swapped else None
        )

    def block(self, inputs, cotangents):
        A, B = inputs.upright, cotangents.moments.upright
        if inputs.swapped is None:
            return KroneckerBlock(A, B)
        return with_partial_traces([(A, B), (cotangents.moments.swapped, inputs.swapped)])

    @property
    def is_reduced(self) -> bool:
        """Whether positions are reduced. Look-ups never are, so that their second moment is exactly diagonal."""
        return self.sharing == "reduce" and not self.view.weight.group.lookups

    def _inputs(
        self, recording: SiteRecords, members: Sequence[MatrixUse], are_live: Live, side: int, budget: MemoryBudget
    ) -> Factor:
        """The second moment of the inputs of all members."""
        view = self.view
        lookups = [member for member in members if member in view.weight.group.lookups]
        products = [member for member in members if member not in lookups]
        moments = [_count_rows(recording, view, member, are_live[member.use.site.number], side) for member in lookups]
        if products:
            moments.append(self._sum_products(recording, products, are_live, side, budget))
        totals, sums = zip(*moments, strict=True)
        total = _tree.sum_leaves(totals)
        return _tree.sum_leaves(sums) / jnp.where(total > 0, total, 1.0)

    def _sum_products(
        self, recording: SiteRecords, members: Sequence[MatrixUse], are_live: Live, side: int, budget: MemoryBudget
    ) -> tuple[Array, Factor]:
        r"""How many positions (or examples) count, and the sum $\sum a a^\top$ of their inputs."""
        examples = jnp.ones(recording.num_examples) if recording.weights is None else recording.weights
        operands = [operand_of(recording, member) for member in members]
        live = [are_live[member.use.site.number] for member in members]

        def moment(chunk) -> tuple[Array, Factor]:
            operands, live, examples = chunk
            inputs = [self.view.inputs(recording, *pair) for pair in zip(members, operands, strict=True)]
            a, w = jnp.concatenate(inputs, axis=2), jnp.concatenate(live, axis=1).astype(inputs[0].dtype)
            # The weights of positions, and of examples, with the axes of `ngtd`.
            w, e = w[:, None, :, None], examples.astype(a.dtype)[:, None, None, None]
            a = w * a
            if self.is_reduced:
                a = jnp.sum(a, axis=2, keepdims=True) / jnp.maximum(jnp.sum(w, axis=2, keepdims=True), 1.0)
                w = jnp.max(w, axis=2, keepdims=True)
            # The weights of positions are zero or one, so they need no root.
            a = a if recording.weights is None else jnp.sqrt(e) * a
            return jnp.sum(w * e), _moment(a, side)

        return summed(moment, (operands, live, examples), self._chunk(recording, members, budget))

    def _num_live(self, recording: SiteRecords, member: MatrixUse) -> Float[Array, "n t"]:
        """How many cotangents of every position are not zero, over all entries of the normal form."""
        h = jax.vmap(jax.vmap(member.form.cotangents))(result_of(recording, member))
        is_live = jnp.any(h != 0, axis=(2, -1)) if h.ndim == 5 else jnp.any(h != 0, axis=-1)
        count = jnp.sum(is_live, axis=1).astype(_tree.wide(h))
        mask = self.masks.get(member.use.site.number)
        return count if mask is None else count * mask.astype(count.dtype)

    def _cotangents(
        self, recording: SiteRecords, members: Sequence[MatrixUse], side: int, budget: MemoryBudget
    ) -> Factor:
        """The sum over examples, columns and positions of products of cotangents."""
        results = [result_of(recording, member) for member in members]
        masks = [self.masks.get(member.use.site.number) for member in members]

        def moment(chunk) -> Factor:
            cotangents = [self.view.cotangents(recording, *use) for use in zip(members, *chunk, strict=True)]
            h = jnp.concatenate(cotangents, axis=3)
            h = jnp.sum(h, axis=3, keepdims=True) if self.is_reduced else h
            return _moment(h.reshape(-1, *h.shape[2:]), side)

        return summed(moment, (results, masks), self._chunk(recording, members, budget))

    def _chunk(self, recording: SiteRecords, members: Sequence[MatrixUse], budget: MemoryBudget) -> int:
        """How many examples to take at once, so that their inputs (patches of a convolution) fit the budget."""
        groups, inputs, outputs = self.place.block
        numbers_each = groups * num_positions(recording, members) * (inputs + recording.num_cotangents * outputs)
        return budget.chunk(recording.num_examples, 8 * numbers_each)


def with_partial_traces(terms: Sequence[tuple[Factor, Factor]]) -> KroneckerBlock:
    r"""The one product $A \otimes B$ with the partial traces of a sum of products $A_i \otimes B_i$:
    $A \propto \sum_i \operatorname{tr}(B_i)\,A_i$ and $B \propto \sum_i \operatorname{tr}(A_i)\,B_i$."""
    traces = [(factor.trace(A), factor.trace(B)) for A, B in terms]
    total = _tree.sum_leaves([a * b for a, b in traces])
    root = jnp.sqrt(jnp.where(total > 0, total, 1.0))
    A = [(b / root)[:, None, None, None] * A for (A, _), (_, b) in zip(terms, traces, strict=True)]
    B = [(a / root)[:, None, None, None] * B for (_, B), (a, _) in zip(terms, traces, strict=True)]
    return KroneckerBlock(_tree.sum_leaves(A), _tree.sum_leaves(B))


def _moment(x: Float[Array, "n g t d"], side: int) -> Factor:
    """The sum over examples and positions of products of vectors with themselves."""
    groups, size = x.shape[1], x.shape[-1]
    return factor.second_moment(x.swapaxes(0, 1).reshape(groups, -1, size), side)


def _count_rows(
    recording: SiteRecords, view: WeightFactors, member: MatrixUse, is_live: Bool[Array, "n t"], side: int
) -> tuple[Array, Factor]:
    """How many rows of a table are read, and how often each is: the second moment of one-hot vectors."""
    rows = indices(member, operand_of(recording, member))
    weights = is_live.astype(_tree.wide(result_of(recording, member)))
    if recording.weights is not None:
        weights = weights * recording.weights.astype(weights.dtype)[:, None]
    num_rows = member.use.value.aval.shape[0]
    counts = jnp.zeros(num_rows, weights.dtype).at[rows.reshape(-1)].add(weights.reshape(-1), mode="drop")
    if view.weight.selection is not None:
        counts = counts[view.weight.selection.inputs]
    return jnp.sum(weights), jax.vmap(jnp.diag)(counts.reshape(-1, side))[None]
