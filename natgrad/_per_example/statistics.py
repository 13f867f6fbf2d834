"""Statistics of the gradients with respect to one parameter, by the route that leads to it."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad import _tree
from natgrad._per_example import factored, lookups, rows
from natgrad._per_example.blocks import factors_of, lookups_of, rows_of
from natgrad._per_example.chunks import Budget
from natgrad._per_example.recording import Recording
from natgrad._sites.copies import CopyOf
from natgrad._sites.routes import Group, Route
from natgrad._sites.values import evaluate


def power_sum(recording: Recording, route: Route, budget: Budget, power: int) -> Float[Array, "..."]:
    r"""$\sum_i g_i^p$ for an even power, entry by entry: an array like the parameter."""
    leaf = recording.leaves[route.leaf]
    if not route.uses:
        return jnp.zeros(leaf.shape, _tree.wide(leaf))
    if not route.groups:
        return rows.power_sum(rows_of(recording, route), power, budget)
    parts = []
    for group in route.groups:
        powers = [kind.power_sum(block, power, budget) for kind, block in _blocks(recording, group)]
        parts.append(_carried(recording, group, _tree.sum_leaves(powers), power))
    return _tree.sum_leaves(parts)


def squared_norms(recording: Recording, route: Route, budget: Budget) -> Float[Array, "n c"]:
    r"""$|g_i|^2$ with respect to the parameter."""
    return _of_blocks("squared_norms", recording, route, budget)


def gram(recording: Recording, route: Route, budget: Budget) -> Float[Array, "n c n c"]:
    r"""$\langle g_i, g_j\rangle$ with respect to the parameter."""
    return _of_blocks("gram", recording, route, budget)


def _of_blocks(statistic: str, recording: Recording, route: Route, budget: Budget) -> Array:
    """A statistic that the parts of a gradient add to, in normal form or else of gradients that are formed."""
    if not _is_unmixed(route):
        return getattr(rows, statistic)(rows_of(recording, route), budget)
    blocks = (pair for group in route.groups for pair in _blocks(recording, group))
    return _tree.sum_leaves([getattr(kind, statistic)(block, budget) for kind, block in blocks])


def _blocks(recording: Recording, group: Group) -> list[tuple[Any, Any]]:
    """The parts of a group, each with the module that knows its statistics."""
    blocks: list[tuple[Any, Any]] = []
    if group.members:
        blocks.append((factored, factors_of(recording, group)))
    if group.lookups:
        blocks.append((lookups, lookups_of(recording, group)))
    return blocks


def _carried(recording: Recording, group: Group, powers: Float[Array, "g d o"], power: int) -> Array:
    """Sums of powers in normal form, carried over to the parameter entry by entry."""
    copy, layout = group.reference.copy, group.reference.layout
    shape = recording.free[copy.value].shape
    (placed,) = jax.linear_transpose(layout.weight, jax.ShapeDtypeStruct(shape, powers.dtype))(powers)
    if copy.is_scaled:
        placed = placed * scale_of(recording, copy).astype(placed.dtype) ** power
    return copy.collect(placed)


def scale_of(recording: Recording, copy: CopyOf) -> Array:
    """What each entry of a copy is multiplied by."""
    (at,) = evaluate([copy.origin], recording.leaves)
    value = lambda x: evaluate([copy.value], recording.leaves, {copy.origin: x})[0]
    return jax.jvp(value, (at,), (jnp.ones_like(at),))[1]


def _is_unmixed(route: Route) -> bool:
    """Whether inner products can be taken in the normal form: its entries are the parameter's, and as they are."""
    members = [member for group in route.groups for member in (*group.members, *group.lookups)]
    return bool(members) and not any(member.copy.is_scaled or member.copy.is_mixed for member in members)
