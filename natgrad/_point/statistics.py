"""The gradients of a batch with respect to one parameter, in the form their statistics are computed from."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad import _tree
from natgrad._point.factored_rows import FactoredRows
from natgrad._point.lookup_rows import LookupRows
from natgrad._point.records import MemoryBudget, SiteRecords
from natgrad._point.rows import AbstractRows, DenseRows
from natgrad._program.values import evaluate
from natgrad._uses.base import Use, local, local_vjp
from natgrad._uses.copies import EntryCopy
from natgrad._uses.normal_form import LookupForm, NormalForm
from natgrad._uses.parameter_uses import MatrixUse, ParameterUses, UseGroup


def factors_of(recording: SiteRecords, group: UseGroup) -> FactoredRows:
    """All uses of a group as one, with their positions one after the other."""
    data = [
        (recording.operand(member.use, member.form.input), recording.cotangents[member.use.site.number][0])
        for member in group.members
    ]
    # Where inputs and cotangents change places, or are set against rows that are read, each cotangent needs inputs
    # of its own: it is treated as an example.
    is_unfolded = bool(group.lookups) or any(member.is_swapped for member in group.members)

    def expand(data):
        pairs = [_expanded(member, *part) for member, part in zip(group.members, data, strict=True)]
        if not is_unfolded:
            inputs, cotangents = zip(*pairs, strict=True)
            return _tree.promote(jnp.concatenate(inputs, axis=2), jnp.concatenate(cotangents, axis=3))
        unfolded = [_unfold(a, h, member.is_swapped) for (a, h), member in zip(pairs, group.members, strict=True)]
        inputs, cotangents = zip(*unfolded, strict=True)
        a, h = jnp.concatenate(inputs, axis=2), jnp.concatenate(cotangents, axis=2)
        a, h = _tree.promote(a, h)
        return a, h[:, None]

    a, h = jax.eval_shape(expand, data)
    shape = (*a.shape[1:], h.shape[-1])
    return FactoredRows(data, expand, recording.num_examples, recording.num_cotangents, shape, a.dtype.itemsize)


def lookups_of(recording: SiteRecords, group: UseGroup) -> LookupRows:
    """All look-ups of a group as one."""
    indices, cotangents = [], []
    for member in group.lookups:
        assert isinstance(member.form, LookupForm)
        indices.append(jax.vmap(member.form.indices)(recording.operand(member.use, member.form.input)))
        h = recording.cotangents[member.use.site.number][0]
        cotangents.append(_tree.at_least_float32(jax.vmap(jax.vmap(member.form.cotangents))(h)))
    num_rows = group.lookups[0].use.value.aval.shape[0]
    index = jnp.concatenate(_tree.promote(*indices), axis=1)
    h = jnp.concatenate(_tree.promote(*cotangents), axis=2)
    h = jnp.where((index < num_rows)[:, None, :, None], h, 0)
    return LookupRows(index, h, num_rows, factors_of(recording, group) if group.members else None)


def rows_of(recording: SiteRecords, parameter: ParameterUses) -> DenseRows:
    """The gradients of examples, by the local derivative of every site the parameter takes part in."""
    leaf = recording.leaves[parameter.leaf]
    values = list(dict.fromkeys(use.value for use in parameter.uses))

    def weights(leaf):
        leaves = list(recording.leaves)
        leaves[parameter.leaf] = leaf
        return evaluate(values, leaves)

    _, carry_on = jax.vjp(weights, leaf)
    given = [recording.free[value] for value in values]
    functions = [local(use.site, use.site.meeting, recording.free, recording.lengths) for use in parameter.uses]

    def gradients(data):
        """The gradients of one example, one for each cotangent."""
        totals = [None] * len(values)
        for use, function, (records, cotangents) in zip(parameter.uses, functions, data, strict=True):
            place, meeting = values.index(use.value), use.site.meeting
            # With respect to all operands that carry a gradient: some derivatives are not defined for one alone.
            at = [recording.free[Use(use.site, k).value] for k in meeting]
            _, pull = local_vjp(use.site, function, at, records)
            gradient = jax.vmap(pull)(tuple(cotangents))[meeting.index(use.operand)]
            totals[place] = gradient if totals[place] is None else totals[place] + gradient
        return _tree.at_least_float32(jax.vmap(lambda *total: carry_on(list(total))[0])(*totals))

    data = [recording.of(use.site) for use in parameter.uses]
    columns = recording.num_cotangents
    size = max(leaf.size, *(value.size for value in given))
    bytes_each = columns * max(leaf.dtype.itemsize, 4) * size
    return DenseRows(data, jax.vmap(gradients), recording.num_examples, columns, bytes_each)


def use_factors(recording: SiteRecords, member: MatrixUse) -> tuple[Any, Any]:
    """The inputs and cotangents of one use, for all examples."""
    inputs = recording.operand(member.use, member.form.input)
    return _expanded(member, inputs, recording.cotangents[member.use.site.number][0])


def _expanded(member: MatrixUse, inputs: Any, cotangents: Any) -> tuple[Any, Any]:
    assert isinstance(member.form, NormalForm)
    a = jax.vmap(member.form.inputs)(inputs)
    h = jax.vmap(jax.vmap(member.form.cotangents))(cotangents)
    return _tree.at_least_float32(a), _tree.at_least_float32(h)


def _unfold(a: Any, h: Any, is_swapped: bool) -> tuple[Any, Any]:
    """Each cotangent as an example: `ngtd` and `ncgto` to `(nc)gtd` and `(nc)gto`, or the two in each other's place."""
    a = jnp.broadcast_to(a[:, None], (*h.shape[:2], *a.shape[1:])).reshape(-1, *a.shape[1:])
    h = h.reshape(-1, *h.shape[2:])
    return (h, a) if is_swapped else (a, h)


def power_sum(
    recording: SiteRecords, parameter: ParameterUses, budget: MemoryBudget, power: int
) -> Float[Array, "..."]:
    r"""$\sum_i g_i^p$ for an even power, entry by entry: an array like the parameter."""
    leaf = recording.leaves[parameter.leaf]
    if not parameter.uses:
        return jnp.zeros(leaf.shape, _tree.wide(leaf))
    if not parameter.groups:
        return rows_of(recording, parameter).power_sum(power, budget)
    parts = []
    for group in parameter.groups:
        powers = [rows.power_sum(power, budget) for rows in _group_rows(recording, group)]
        parts.append(_carried(recording, group, _tree.sum_leaves(powers), power))
    return _tree.sum_leaves(parts)


def squared_norms(recording: SiteRecords, parameter: ParameterUses, budget: MemoryBudget) -> Float[Array, "n c"]:
    r"""$|g_i|^2$ with respect to the parameter."""
    return _tree.sum_leaves([rows.squared_norms(budget) for rows in _all_rows(recording, parameter)])


def gram(recording: SiteRecords, parameter: ParameterUses, budget: MemoryBudget) -> Float[Array, "n c n c"]:
    r"""$\langle g_i, g_j\rangle$ with respect to the parameter."""
    return _tree.sum_leaves([rows.gram(budget) for rows in _all_rows(recording, parameter)])


def _all_rows(recording: SiteRecords, parameter: ParameterUses) -> list[AbstractRows]:
    """The parts of a gradient whose inner products add up: in normal form, or else gradients that are formed."""
    if not _is_unmixed(parameter):
        return [rows_of(recording, parameter)]
    return [rows for group in parameter.groups for rows in _group_rows(recording, group)]


def _group_rows(recording: SiteRecords, group: UseGroup) -> list[AbstractRows]:
    rows: list[AbstractRows] = []
    if group.members:
        rows.append(factors_of(recording, group))
    if group.lookups:
        rows.append(lookups_of(recording, group))
    return rows


def _carried(recording: SiteRecords, group: UseGroup, powers: Float[Array, "g d o"], power: int) -> Array:
    """Sums of powers in normal form, carried over to the parameter entry by entry."""
    copy, form = group.reference.copy, group.reference.form
    shape = recording.free[copy.value].shape
    (placed,) = jax.linear_transpose(form.weight, jax.ShapeDtypeStruct(shape, powers.dtype))(powers)
    if copy.is_scaled:
        placed = placed * scale_of(recording, copy).astype(placed.dtype) ** power
    return copy.collect(placed)


def scale_of(recording: SiteRecords, copy: EntryCopy) -> Array:
    """What each entry of a copy is multiplied by."""
    (at,) = evaluate([copy.origin], recording.leaves)

    def value(x):
        return evaluate([copy.value], recording.leaves, {copy.origin: x})[0]

    return jax.jvp(value, (at,), (jnp.ones_like(at),))[1]


def _is_unmixed(parameter: ParameterUses) -> bool:
    """Whether inner products can be taken in the normal form: its entries are the parameter's, and as they are."""
    members = [member for group in parameter.groups for member in (*group.members, *group.lookups)]
    return bool(members) and not any(member.copy.is_scaled or member.copy.is_mixed for member in members)
