r"""Statistics of gradients of a table: $g_i$ has $\sum_{t: i_t = v} h_{it}$ in row $v$, and, where the table also
serves as a weight, the gradient of that use.

Nothing of the size of the table is formed for an example, except one row of the Gram matrix at a time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from natgrad._per_example.chunks import Budget, stacked
from natgrad._per_example.factored import Factors


class Lookups(NamedTuple):
    """Rows that examples look up (the number of rows where they look up none), the cotangents of what they read, and
    the factors of the table's other uses, with one cotangent for each of their rows."""

    indices: Int[Array, "n t"]
    cotangents: Float[Array, "n c t o"]
    num_rows: int
    others: Factors | None

    @property
    def num_cotangents(self) -> int:
        return self.cotangents.shape[1]


def power_sum(lookups: Lookups, power: int, budget: Budget) -> Float[Array, "1 v o"]:
    """What looking up adds to the sum of powers, beyond those of the other uses."""
    width = lookups.cotangents.shape[-1]
    values = stacked(
        lambda part: jnp.sum(_added(lookups, power, part), axis=1), _data(lookups), _chunk(lookups, budget)
    )
    table = jnp.zeros((lookups.num_rows, width), values.dtype)
    return table.at[lookups.indices.reshape(-1)].add(values.reshape(-1, width), mode="drop")[None]


def squared_norms(lookups: Lookups, budget: Budget) -> Float[Array, "n c"]:
    norms = lambda part: jnp.sum(_added(lookups, 2, part), axis=(2, 3))
    return stacked(norms, _data(lookups), _chunk(lookups, budget))


def gram(lookups: Lookups, budget: Budget) -> Float[Array, "n c n c"]:
    count, columns, _, width = lookups.cotangents.shape
    h = lookups.cotangents
    a, k = _expanded(lookups.others) if lookups.others is not None else (None, None)

    def row(example):
        indices, own = example
        table = jnp.zeros((columns, lookups.num_rows, width), h.dtype).at[:, indices].add(own, mode="drop")
        read = jnp.take(table, lookups.indices, axis=1, mode="fill", fill_value=0)
        among = jnp.einsum("cmto,meto->cme", read, h)
        if a is None or k is None:
            return among, among
        inputs = jnp.take(a, indices, axis=-1, mode="fill", fill_value=0)
        across = jnp.einsum("nest,neso,cto->cne", inputs, k, own)
        return among, across

    among, across = jax.lax.map(row, (lookups.indices, h))
    if lookups.others is None:
        return among
    return among + across + across.transpose(2, 3, 0, 1)


def _added(lookups: Lookups, power: int, part) -> Float[Array, "n c t o"]:
    r"""For every position, its share of $(r + s)^p - s^p$, where $r$ is what the look-ups give to the row that it reads
    and $s$ what other uses give to it. Positions that read the same row share alike."""
    indices, h = part[:2]
    same = (indices[:, :, None] == indices[:, None, :]).astype(h.dtype)
    share = (indices < lookups.num_rows).astype(h.dtype) / jnp.sum(same, axis=-1)
    read = jnp.einsum("nts,ncso->ncto", same, h)
    if lookups.others is None:
        return read**power * share[:, None, :, None]
    a, k = _expanded(lookups.others, part[2])
    inputs = jax.vmap(lambda a, i: jnp.take(a, i, axis=-1, mode="fill", fill_value=0))(a, indices)
    other = jnp.einsum("ncst,ncso->ncto", inputs, k)
    return ((read + other) ** power - other**power) * share[:, None, :, None]


def _expanded(others: Factors, data=None) -> tuple[Float[Array, "n c s v"], Float[Array, "n c s o"]]:
    """The factors of the other uses, in one group, with their cotangents told apart again."""
    a, k = others.expand(others.data if data is None else data)
    split = lambda x: x.reshape(-1, others.num_cotangents, *x.shape[-2:])
    return split(a), split(k)


def _data(lookups: Lookups) -> tuple:
    data = (lookups.indices, lookups.cotangents)
    return data if lookups.others is None else (*data, lookups.others.data)


def _chunk(lookups: Lookups, budget: Budget) -> int:
    count, columns, positions, width = lookups.cotangents.shape
    each = positions**2 + 2 * columns * positions * width
    others = lookups.others.expanded_bytes() if lookups.others is not None else 0
    return budget.chunk(count, lookups.cotangents.dtype.itemsize * each + others)
