"""What a batch leaves behind at the sites, from which every statistic is computed."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from natgrad._sites.plan import Site
from natgrad._sites.uses import Use, spread
from natgrad._sites.values import Dependent, Free


@dataclass(frozen=True)
class Recording:
    """The parameters, the free values made of them, the recorded values with the examples in front, and the cotangents
    of the sites' results, with the examples and then the cotangents of each example in front. Where examples count
    differently, `weights` says how much each does among inputs; cotangents have the roots of them already."""

    leaves: list[Any]
    free: dict[Free, Any]
    records: dict[Dependent, Any]
    cotangents: dict[int, list[Any]]
    lengths: dict[int, int]
    weights: Any = None

    @property
    def num_examples(self) -> int:
        return next(iter(self.cotangents.values()))[0].shape[0]

    @property
    def num_cotangents(self) -> int:
        return next(iter(self.cotangents.values()))[0].shape[1]

    def of(self, site: Site) -> tuple[list[Any], list[Any]]:
        return [self.records[value] for value in site.recorded], self.cotangents[site.number]

    def operand(self, use: Use, position: int) -> Any:
        """An operand beside the weight, for every example and every step of the site's loops."""
        value, loops = use.site.operands[position], use.site.loops
        if isinstance(value, Dependent):
            return jax.vmap(lambda x: spread(x, value.loops, loops, self.lengths))(self.records[value])
        known = spread(jnp.asarray(self.free[value]), value.loops, loops, self.lengths)
        return jnp.broadcast_to(known, (self.num_examples, *known.shape))
