"""Penalties on parameters, by their paths: `l2` in the loss, and weight decay beside the step."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from natgrad import _tree
from natgrad._optimiser.damping import AbstractDamping, DampingMatrix
from natgrad._optimiser.step.base import scheduled
from natgrad._tree import check_paths, option_for


def damping_matrix(damping: AbstractDamping, strength: Any, l2: Mapping[str, float], params: PyTree) -> DampingMatrix:
    """What is added to the metric of a cost with `l2`, for a damping of some strength."""
    names, sizes = _names_and_sizes(params)
    check_paths(l2, names, "l2")
    options = [option_for(l2, name) for name in names]
    return damping.added(strength, tuple(0.0 if option is None else float(option) for option in options), names, sizes)


def decay_rates(weight_decay: Mapping[str, Any], params: PyTree, steps: Int[Array, ""]) -> Array | None:
    """By what part of the learning rate every entry of the parameters shrinks; one number if it is the same for all,
    and `None` if nothing shrinks."""
    if not any(weight_decay.values()):
        return None
    names, sizes = _names_and_sizes(params)
    check_paths(weight_decay, names, "weight_decay")
    options = [option_for(weight_decay, name) for name in names]
    rates = [jnp.asarray(0.0 if option is None else scheduled(option, steps), float) for option in options]
    if list(weight_decay) == [""]:
        return rates[0]
    return jnp.concatenate([jnp.full(size, rate) for size, rate in zip(sizes, rates, strict=True)])


def _names_and_sizes(params: PyTree) -> tuple[tuple[str, ...], tuple[int, ...]]:
    return _tree.names(params), tuple(leaf.size for leaf in jax.tree.leaves(params))
