"""The inputs and cotangents of the uses of a weight, from which its Kronecker factors are computed.

They differ from the inputs and cotangents of the normal form: only the rows and columns of the weight are selected, an
input for the bias is added, factors of low-rank weights and scales are multiplied in, and masked positions are zero."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from natgrad import _tree
from natgrad._point.records import SiteRecords
from natgrad._point.statistics import scale_of
from natgrad._program.values import evaluate
from natgrad._uses.copies import EntryCopy
from natgrad._uses.layers import Bias, Weight
from natgrad._uses.normal_form import LookupForm, NormalForm
from natgrad._uses.parameter_uses import MatrixUse

# For the number of each site, a mask `n t` of zeros and ones over examples and positions.
Masks = dict[int, Array]


@dataclass(frozen=True, eq=False)
class WeightFactors:
    """The inputs and cotangents of a weight's uses, for one block.

    With a `bias`, inputs have one more entry: the number by which the bias is multiplied at that use, usually one. With
    `is_bias` the block covers the bias alone, and that entry is the only one."""

    weight: Weight
    bias: Bias | None
    is_bias: bool = False

    @property
    def upright(self) -> tuple[MatrixUse, ...]:
        """The uses of the weight itself, look-ups first."""
        if self.is_bias:
            return self.bias.members if self.bias is not None else ()
        return (*self.weight.group.lookups, *self.weight.upright)

    @property
    def swapped(self) -> tuple[MatrixUse, ...]:
        """The uses of the transpose of the weight."""
        return () if self.is_bias else self.weight.swapped

    def inputs(self, recording: SiteRecords, member: MatrixUse, operand: Any) -> Float[Array, "n g t d"]:
        """The inputs of a use, from the operand beside the weight."""
        assert isinstance(member.form, NormalForm)
        a = self._select(_tree.at_least_float32(jax.vmap(member.form.inputs)(operand)), member.is_swapped)
        if member.low_rank is not None and not member.low_rank.is_output:
            a = jnp.einsum("ngtd,gkd->ngtk", a, self._other_factor(recording, member, a))
        a = _apply_scales(recording, member, a)
        if self.bias is None or member.is_swapped:
            return a
        bias_input = jnp.broadcast_to(self._bias_input(recording, member).astype(a.dtype), (*a.shape[:-1], 1))
        return bias_input if self.is_bias else jnp.concatenate([a, bias_input], axis=-1)

    def cotangents(
        self, recording: SiteRecords, member: MatrixUse, result: Any, mask: Any
    ) -> Float[Array, "n c g t o"]:
        """The cotangents of a use, from the cotangents of the result of its site; zero at masked positions."""
        h = _tree.at_least_float32(jax.vmap(jax.vmap(member.form.cotangents))(result))
        if isinstance(member.form, LookupForm):
            h = h[:, :, None]
        h = self._select(h, not member.is_swapped)
        if member.low_rank is not None and member.low_rank.is_output and not self.is_bias:
            h = jnp.einsum("ncgto,gko->ncgtk", h, self._other_factor(recording, member, h))
        if isinstance(member.form, LookupForm):
            h = _apply_scales(recording, member, h)
        if member.is_swapped and self.bias is not None:
            h = jnp.pad(h, [(0, 0)] * (h.ndim - 1) + [(0, 1)])
        return h if mask is None else h * mask[:, None, None, :, None].astype(h.dtype)

    def _bias_input(self, recording: SiteRecords, member: MatrixUse) -> Array:
        """The number by which the bias is multiplied at a use; zero where it is not added."""
        uses = [use for use in self.bias.uses if use.member is member] if self.bias is not None else []
        if not uses:
            return jnp.zeros(())
        scale = uniform_scale(recording, uses[0].copy) if uses[0].copy.is_scaled else jnp.ones(())
        return -scale if uses[0].is_subtracted else scale

    def _other_factor(self, recording: SiteRecords, member: MatrixUse, like: Array) -> Array:
        """The other factor of a weight that is a product, `gkd` or `gko`."""
        (value,) = evaluate([member.low_rank.other_factor], recording.leaves)
        return member.low_rank.matrix(value).astype(like.dtype)

    def _select(self, x: Array, is_output: bool) -> Array:
        """The entries of inputs `... g t d`, or of outputs `... g t o`, that belong to the parameter."""
        selection = self.weight.selection
        if selection is None:
            return x
        columns = selection.outputs if is_output else selection.inputs
        return jnp.take(jnp.take(x, selection.groups, axis=-3), columns, axis=-1)


def operand_of(recording: SiteRecords, member: MatrixUse) -> Any:
    """The operand beside the weight: inputs, or the indices of a look-up."""
    return recording.operand(member.use, member.form.input)


def result_of(recording: SiteRecords, member: MatrixUse) -> Any:
    """The cotangents of the result of a use."""
    return recording.cotangents[member.use.site.number][0]


def indices(member: MatrixUse, operand: Any) -> Int[Array, "n t"]:
    """The numbers of the rows that a look-up reads."""
    assert isinstance(member.form, LookupForm)
    return jax.vmap(member.form.indices)(operand)


def num_positions(recording: SiteRecords, members: Sequence[MatrixUse]) -> int:
    """The number of positions of one example, over all uses."""
    return sum(math.prod(member.positions(recording.lengths)) for member in members)


def _apply_scales(recording: SiteRecords, member: MatrixUse, x: Array) -> Array:
    """Inputs (for a look-up, cotangents) times the numbers by which the parameter is multiplied in the weight."""
    copies: list[EntryCopy] = [member.copy] if member.low_rank is None else [member.copy, member.low_rank.copy]
    for copy in copies:
        if copy.is_scaled:
            x = x * uniform_scale(recording, copy).astype(x.dtype)
    return x


def uniform_scale(recording: SiteRecords, copy: EntryCopy) -> Array:
    """The number by which all entries of a uniform copy are multiplied."""
    # Entries from elsewhere have scale zero, so the number is the largest or the smallest of all scales.
    scales = scale_of(recording, copy)
    high, low = jnp.max(scales), jnp.min(scales)
    return jnp.where(high > -low, high, low)
