"""The inputs and cotangents of a weight's uses, as the block of the weight sees them: its own rows and columns, with
the one that stands for the bias, and without the positions that a mask leaves out."""

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

# Where a position counts and where not (examples, positions), by the number of a use's site.
Masks = dict[int, Array]


@dataclass(frozen=True, eq=False)
class WeightFactors:
    """How a block sees the uses of a weight.

    With a `bias`, inputs get one more entry: what the bias is multiplied by at that use, usually one. With `is_bias`
    that entry is all they have."""

    weight: Weight
    bias: Bias | None
    is_bias: bool = False

    @property
    def upright(self) -> tuple[MatrixUse, ...]:
        """The uses along the weight, look-ups first."""
        if self.is_bias:
            return self.bias.members if self.bias is not None else ()
        return (*self.weight.group.lookups, *self.weight.upright)

    @property
    def swapped(self) -> tuple[MatrixUse, ...]:
        """The uses along its transpose."""
        return () if self.is_bias else self.weight.swapped

    def inputs(self, recording: SiteRecords, member: MatrixUse, operand: Any) -> Float[Array, "n g t d"]:
        """The inputs of a use, from the operand that stands beside the weight."""
        assert isinstance(member.form, NormalForm)
        a = self._select(_tree.at_least_float32(jax.vmap(member.form.inputs)(operand)), member.is_swapped)
        if member.through is not None and not member.through.is_output:
            a = jnp.einsum("ngtd,gkd->ngtk", a, self._other(recording, member, a))
        a = _scaled(recording, member, a)
        if self.bias is None or member.is_swapped:
            return a
        one = jnp.broadcast_to(self._one(recording, member).astype(a.dtype), (*a.shape[:-1], 1))
        return one if self.is_bias else jnp.concatenate([a, one], axis=-1)

    def cotangents(
        self, recording: SiteRecords, member: MatrixUse, result: Any, mask: Any
    ) -> Float[Array, "n c g t o"]:
        """The cotangents of a use, from those of the site's result, without those that do not count."""
        h = _tree.at_least_float32(jax.vmap(jax.vmap(member.form.cotangents))(result))
        if isinstance(member.form, LookupForm):
            h = h[:, :, None]
        h = self._select(h, not member.is_swapped)
        if member.through is not None and member.through.is_output and not self.is_bias:
            h = jnp.einsum("ncgto,gko->ncgtk", h, self._other(recording, member, h))
        if isinstance(member.form, LookupForm):
            h = _scaled(recording, member, h)
        if member.is_swapped and self.bias is not None:
            h = jnp.pad(h, [(0, 0)] * (h.ndim - 1) + [(0, 1)])
        return h if mask is None else h * mask[:, None, None, :, None].astype(h.dtype)

    def _one(self, recording: SiteRecords, member: MatrixUse) -> Array:
        """What the bias is multiplied by at a use; zero where it is not added."""
        own = [one for one in self.bias.added if one.member is member] if self.bias is not None else []
        if not own:
            return jnp.zeros(())
        scale = number(recording, own[0].copy) if own[0].copy.is_scaled else jnp.ones(())
        return -scale if own[0].is_subtracted else scale

    def _other(self, recording: SiteRecords, member: MatrixUse, like: Array) -> Array:
        """The other factor of a weight that is a product."""
        (value,) = evaluate([member.through.factor], recording.leaves)
        return member.through.matrix(value).astype(like.dtype)

    def _select(self, x: Array, is_output: bool) -> Array:
        """The part of `... g t d` that belongs to the parameter."""
        selection = self.weight.selection
        if selection is None:
            return x
        own = selection.outputs if is_output else selection.inputs
        return jnp.take(jnp.take(x, selection.groups, axis=-3), own, axis=-1)


def operand_of(recording: SiteRecords, member: MatrixUse) -> Any:
    """What stands beside the weight: inputs, or the rows that a look-up reads."""
    return recording.operand(member.use, member.form.input)


def result_of(recording: SiteRecords, member: MatrixUse) -> Any:
    """The cotangents of what comes out."""
    return recording.cotangents[member.use.site.number][0]


def indices(member: MatrixUse, operand: Any) -> Int[Array, "n t"]:
    """The rows that a look-up reads."""
    assert isinstance(member.form, LookupForm)
    return jax.vmap(member.form.indices)(operand)


def num_positions(recording: SiteRecords, members: Sequence[MatrixUse]) -> int:
    """Of all uses together."""
    return sum(math.prod(member.positions(recording.lengths)) for member in members)


def _scaled(recording: SiteRecords, member: MatrixUse, x: Array) -> Array:
    """Inputs (for a look-up, cotangents) times the number that the parameter is multiplied by in its weight."""
    copies: list[EntryCopy] = [member.copy] if member.through is None else [member.copy, member.through.own]
    for copy in copies:
        if copy.is_scaled:
            x = x * number(recording, copy).astype(x.dtype)
    return x


def number(recording: SiteRecords, copy: EntryCopy) -> Array:
    """What a uniform copy is multiplied by: the same for all entries of the parameter, and zero for others beside
    them."""
    scales = scale_of(recording, copy)
    high, low = jnp.max(scales), jnp.min(scales)
    return jnp.where(high > -low, high, low)
