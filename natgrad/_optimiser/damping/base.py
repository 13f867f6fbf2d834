"""What is added to a metric before it is inverted."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from natgrad._blocks.paths import check_paths, option_for
from natgrad._types import Scalar


class Added(NamedTuple):
    r"""The diagonal matrix that is added to a metric: `strength` times a number for every parameter, plus the `l2`
    coefficient of every parameter. With `is_relative` the first part is also multiplied by the diagonal of the metric.
    """

    strength: Any
    multipliers: tuple[float, ...]
    l2: tuple[float, ...]
    is_relative: bool

    def of_leaf(self, leaf: int) -> Any:
        """What is added to the diagonal at a parameter; with `is_relative`, what is added besides."""
        own = 0.0 if self.is_relative else self.strength * self.multipliers[leaf]
        return own + self.l2[leaf]

    def each(self) -> list[Any]:
        return [self.of_leaf(leaf) for leaf in range(len(self.l2))]

    @property
    def is_uniform(self) -> bool:
        """Whether the same number is added everywhere."""
        return not self.is_relative and len(set(self.multipliers)) == len(set(self.l2)) == 1

    def mv(self, v: PyTree, diagonal: PyTree | None = None) -> PyTree:
        """The product with what is added, given the diagonal of the metric where it is relative to that."""
        leaves, treedef = jax.tree.flatten(v)
        units = jax.tree.leaves(diagonal) if self.is_relative else [1.0] * len(leaves)
        factors = [
            self.l2[k] + (self.strength * self.multipliers[k] * units[k] if self.is_relative else self.of_leaf(k) - self.l2[k])
            for k in range(len(leaves))
        ]
        scaled = [jnp.asarray(factor, leaf.dtype) * leaf for factor, leaf in zip(factors, leaves, strict=True)]
        return jax.tree.unflatten(treedef, scaled)


class Outcome(NamedTuple):
    """What came of a step. The loss after it and the predicted decrease are NaN where they were not computed."""

    count: Int[Array, ""]
    loss: Scalar
    loss_after: Scalar
    predicted_decrease: Scalar
    is_rejected: Bool[Array, ""]


class AbstractDamping(eqx.Module):
    """How much is added to a metric, step by step.

    The strength may start from the mean eigenvalue of the metric on the first batch. `shape` is what it multiplies: the
    `"identity"`, or the `"diagonal"` of the metric, which makes steps independent of the units of parameters.
    `multipliers` are factors for the parameters at or below a path."""

    shape: eqx.AbstractVar[str]
    multipliers: eqx.AbstractVar[Mapping[str, float] | None]

    def init(self) -> PyTree:
        """The state before the first step."""
        return ()

    def start(self, state: PyTree, mean_eigenvalue: Scalar) -> PyTree:
        """The state once the metric of the first batch is known."""
        del mean_eigenvalue
        return state

    @abstractmethod
    def strength(self, state: PyTree, count: Int[Array, ""]) -> Any: ...

    def update(self, state: PyTree, outcome: Outcome) -> PyTree:
        del outcome
        return state

    def wants_loss_after(self, count: Int[Array, ""]) -> Bool[Array, ""] | bool:
        """Whether the loss after this step, and the decrease that was predicted, are needed."""
        del count
        return False

    @property
    def is_adaptive(self) -> bool:
        return False

    @property
    def needs_mean(self) -> bool:
        """Whether the mean eigenvalue of the metric is needed at the first step."""
        return False

    def added(self, strength: Any, l2: tuple[float, ...], names: tuple[str, ...]) -> Added:
        chosen = self.multipliers or {}
        check_paths(chosen, names, f"`{type(self).__name__}`: `multipliers`")
        each = [option_for(chosen, name) for name in names]
        return Added(strength, tuple(1.0 if m is None else float(m) for m in each), l2, self.shape == "diagonal")


def check_shape(damping: AbstractDamping) -> None:
    name = type(damping).__name__
    if damping.shape not in ("identity", "diagonal"):
        raise ValueError(f'`{name}` needs a `shape` of "identity" or "diagonal", but got {damping.shape!r}.')
    for path, factor in (damping.multipliers or {}).items():
        if not factor > 0:
            raise ValueError(f"`{name}` needs `multipliers` above 0, but that of `{path}` is {factor}.")
