r"""Per-example gradients of a table: $g_i$ has $\sum_{t: i_t = v} h_{it}$ in row $v$, and, where the table also serves
as a weight, the gradient of that use.

Nothing of the size of the table is formed for an example, except one row of the Gram matrix at a time."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from natgrad._point.factored_rows import FactoredRows
from natgrad._point.records import MemoryBudget, stacked
from natgrad._point.rows import AbstractRows


@dataclass(frozen=True)
class LookupRows(AbstractRows):
    """Rows that examples look up (the number of rows where they look up none), the cotangents of what they read, and
    the factors of the table's other uses, with one cotangent for each of their rows.

    Sums of powers are what looking up adds to those of the other uses."""

    indices: Int[Array, "n t"]
    cotangents: Float[Array, "n c t o"]
    num_rows: int
    others: FactoredRows | None

    @property
    def num_cotangents(self) -> int:
        return self.cotangents.shape[1]

    def power_sum(self, power, budget):
        width = self.cotangents.shape[-1]
        values = stacked(lambda part: jnp.sum(self._added(power, part), axis=1), self._data(), self._chunk(budget))
        table = jnp.zeros((self.num_rows, width), values.dtype)
        return table.at[self.indices.reshape(-1)].add(values.reshape(-1, width), mode="drop")[None]

    def squared_norms(self, budget):
        norms = lambda part: jnp.sum(self._added(2, part), axis=(2, 3))
        return stacked(norms, self._data(), self._chunk(budget))

    def gram(self, budget):
        del budget
        h = self.cotangents
        _, columns, _, width = h.shape
        a, k = _expanded(self.others) if self.others is not None else (None, None)

        def row(example):
            indices, cotangents = example
            table = jnp.zeros((columns, self.num_rows, width), h.dtype).at[:, indices].add(cotangents, mode="drop")
            read = jnp.take(table, self.indices, axis=1, mode="fill", fill_value=0)
            among = jnp.einsum("cmto,meto->cme", read, h)
            if a is None or k is None:
                return among, among
            inputs = jnp.take(a, indices, axis=-1, mode="fill", fill_value=0)
            across = jnp.einsum("nest,neso,cto->cne", inputs, k, cotangents)
            return among, across

        among, across = jax.lax.map(row, (self.indices, h))
        if self.others is None:
            return among
        return among + across + across.transpose(2, 3, 0, 1)

    def _added(self, power: int, part: tuple) -> Float[Array, "n c t o"]:
        r"""For every position, its share of $(r + s)^p - s^p$, where $r$ is what the look-ups give to the row that it
        reads and $s$ what other uses give to it. Positions that read the same row share alike."""
        indices, h = part[:2]
        same = (indices[:, :, None] == indices[:, None, :]).astype(h.dtype)
        share = (indices < self.num_rows).astype(h.dtype) / jnp.sum(same, axis=-1)
        read = jnp.einsum("nts,ncso->ncto", same, h)
        if self.others is None:
            return read**power * share[:, None, :, None]
        a, k = _expanded(self.others, part[2])
        inputs = jax.vmap(lambda a, i: jnp.take(a, i, axis=-1, mode="fill", fill_value=0))(a, indices)
        other = jnp.einsum("ncst,ncso->ncto", inputs, k)
        return ((read + other) ** power - other**power) * share[:, None, :, None]

    def _data(self) -> tuple:
        data = (self.indices, self.cotangents)
        return data if self.others is None else (*data, self.others.data)

    def _chunk(self, budget: MemoryBudget) -> int:
        count, columns, positions, width = self.cotangents.shape
        numbers = positions**2 + 2 * columns * positions * width
        others = self.others.expanded_bytes() if self.others is not None else 0
        return budget.chunk(count, self.cotangents.dtype.itemsize * numbers + others)


def _expanded(others: FactoredRows, data: Any = None) -> tuple[Float[Array, "n c s v"], Float[Array, "n c s o"]]:
    """The factors of the other uses, in one group, with their cotangents told apart again."""
    a, k = others.expand(others.data if data is None else data)

    def split(x):
        return x.reshape(-1, others.num_cotangents, *x.shape[-2:])

    return split(a), split(k)
