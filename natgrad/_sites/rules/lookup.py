"""Tables whose rows are looked up: embeddings, without ever writing an index as a one-hot vector."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from natgrad._sites import compat
from natgrad._sites.rules.layout import arrange, shifted
from natgrad._sites.uses import Use


class LookupLayout(NamedTuple):
    r"""How to see one use of a table as reading rows: the gradient for one example has $\sum_{t: i_t = v} h_t$ in
    row $v$. An index that reads nothing is given as the number of rows."""

    input: int
    indices: Callable[[Any], Any]
    cotangents: Callable[[Any], Any]
    weight: Callable[[Any], Any]
    places: tuple[int, ...]


def layout(use: Use) -> LookupLayout | None:
    eqn = use.site.eqn
    parts = compat.lookup(eqn) if eqn is not None else None
    groups, shared = use.loop_axes
    if eqn is None or parts is None or use.operand != 0 or groups:
        return None
    num_rows = eqn.invars[0].aval.shape[0]
    rank, loops = len(eqn.outvars[0].aval.shape), len(shared)
    places = tuple(axis for axis in range(rank) if axis not in parts.row_axes)

    def indices(x):
        rows = (x if parts.component is None else x[..., parts.component]).reshape(-1)
        if parts.drops_outside:
            return jnp.where((rows >= 0) & (rows < num_rows), rows, num_rows)
        return jnp.clip(rows, 0, num_rows - 1)

    return LookupLayout(
        1,
        indices,
        lambda h: arrange(h, (*shared, *shifted(places, loops)), shifted(parts.row_axes, loops)),
        lambda w: w.reshape(1, num_rows, -1),
        tuple(eqn.outvars[0].aval.shape[axis] for axis in places),
    )
