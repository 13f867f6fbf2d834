"""Penalties on parameters, by their paths: `L2` in the loss, and `WeightDecay` beside the step."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from natgrad import _tree
from natgrad._check import public
from natgrad._optimiser.by_path import LeafNumbers, NumberByPath, by_path, spread
from natgrad._optimiser.damping import AbstractDamping, DampingMatrix
from natgrad._optimiser.step.base import scheduled


class AbstractPenalty(eqx.Module):
    """What pulls parameters towards zero."""

    value: eqx.AbstractVar[NumberByPath]

    @abstractmethod
    def curvature(self, names: Sequence[str]) -> LeafNumbers:
        """By what the penalty in the loss adds to the diagonal of the metric, for every parameter."""

    @abstractmethod
    def shrinkage(self, params: PyTree, steps: Int[Array, ""]) -> Array | None:
        """By what part of the learning rate every entry of the parameters shrinks beside the step; one number if it is
        the same for all, and `None` if nothing shrinks."""


class L2(AbstractPenalty):
    r"""Adds $\frac{l}{2}|w|^2$ to the loss, and so once to gradient, metric and quadratic model.

    **Arguments:**

    - `value`: $l$, a number; or a mapping from paths to numbers, for the parameters at or below them.

    ```python
    import natgrad as ng

    model = lambda params, x: x @ params["w"] + params["b"]
    ng.NaturalGradient(model, ng.Categorical(), penalty=ng.L2({"params['w']": 1e-4}))
    ```
    """

    value: NumberByPath = eqx.field(converter=by_path(0.0))

    @public
    def __check_init__(self):
        self.value.check("value", least=0)

    def curvature(self, names):
        return self.value.of_leaves(names, "L2")

    def shrinkage(self, params, steps):
        return None


class WeightDecay(AbstractPenalty):
    """Shrinks the parameters by a part of the learning rate, beside the step and not in the metric.

    **Arguments:**

    - `value`: a number or a schedule from optax; or a mapping from paths to these, for the parameters at or below them.

    ```python
    import natgrad as ng

    model = lambda params, x: x @ params["w"] + params["b"]
    ng.NaturalGradient(model, ng.Categorical(), step=ng.KLClip(), penalty=ng.WeightDecay({"params['w']": 0.01}))
    ```
    """

    value: NumberByPath = eqx.field(converter=by_path(0.0))

    @public
    def __check_init__(self):
        self.value.check("value", least=0, schedules=True)

    def curvature(self, names):
        return no_curvature(names)

    def shrinkage(self, params, steps):
        if self.value.is_default:
            return None
        names, sizes = _names_and_sizes(params)
        rates = self.value.of_leaves(names, "WeightDecay")
        values = [jnp.asarray(scheduled(rates.at(leaf), steps), float) for leaf in range(len(names))]
        return values[0] if rates.is_uniform else spread(values, sizes)


def no_curvature(names: Sequence[str]) -> LeafNumbers:
    return LeafNumbers((0.0,), (0,) * len(names))


def damping_matrix(
    damping: AbstractDamping, strength: Any, penalty: AbstractPenalty | None, params: PyTree
) -> DampingMatrix:
    """What is added to the metric of a cost with a penalty, for a damping of some strength."""
    names, sizes = _names_and_sizes(params)
    l2 = no_curvature(names) if penalty is None else penalty.curvature(names)
    return damping.matrix(strength, l2, names, sizes)


def _names_and_sizes(params: PyTree) -> tuple[tuple[str, ...], tuple[int, ...]]:
    return _tree.names(params), tuple(leaf.size for leaf in jax.tree.leaves(params))
