"""What is minimised, and how outputs are measured: a loss and a geometry for one example."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._family.base import AbstractFamily
from natgrad._geometry.base import AbstractGeometry
from natgrad._geometry.euclidean import Euclidean
from natgrad._geometry.fisher import Fisher
from natgrad._types import Output, Scalar


class AbstractObjective(eqx.Module):
    """A loss of one example's output and its target, and the geometry in which outputs are measured."""

    @abstractmethod
    def loss(self, z: Output, y: PyTree) -> Scalar: ...

    @property
    @abstractmethod
    def geometry(self) -> AbstractGeometry: ...


class Objective(AbstractObjective):
    """Any loss `loss(z, y)` of one example, with any geometry.

    The two need not belong together: a natural gradient is the gradient of the loss, measured in the geometry."""

    _loss: Callable
    _geometry: AbstractGeometry

    def __init__(self, loss: Any, geometry: Any):
        if not callable(loss):
            raise TypeError(
                f"`Objective` needs a function `loss(z, y)` of one example, but got `{type(loss).__name__}`."
            )
        if not isinstance(geometry, AbstractGeometry):
            raise TypeError(
                f"`Objective` needs a geometry, such as `Euclidean()`, but got `{type(geometry).__name__}`. Write "
                "`Fisher(family)` for the geometry of a family."
            )
        self._loss = _tree.as_callable(loss)
        self._geometry = geometry

    def loss(self, z, y):
        return self._loss(z, y)

    @property
    def geometry(self):
        return self._geometry


class LeastSquares(AbstractObjective):
    r"""Half the squared residual $\frac12\|z - y\|^2$ in the Euclidean geometry. A target of `None` is zero."""

    def loss(self, z, y):
        residual = z if y is None else jax.tree.map(lambda z, y: z - jnp.asarray(y).astype(z.dtype), z, y)
        return _tree.vdot(residual, residual) / 2

    @property
    def geometry(self):
        return Euclidean()


class Likelihood(AbstractObjective):
    r"""The negative log-likelihood of an exponential family with natural parameters $z$, in its Fisher metric.

    Targets need not be observations: any mean of observations (such as grey pixels under `Bernoulli`) will do."""

    family: AbstractFamily

    def loss(self, z, y):
        wide = _tree.at_least_float32(z)
        dtype = jax.tree.leaves(wide)[0].dtype
        return -self.family._log_prob(wide, self.family._observed(y, "The target", dtype))

    @property
    def geometry(self):
        return Fisher(self.family)


def as_objective(objective: Any, subject: str) -> AbstractObjective:
    """An objective, or a family as one."""
    if isinstance(objective, AbstractFamily):
        return Likelihood(objective)
    if isinstance(objective, AbstractObjective):
        return objective
    raise TypeError(
        f"{subject} needs an `objective`: an exponential family, `LeastSquares()`, or `Objective(loss, geometry)`; but "
        f"got `{type(objective).__name__}`."
    )
