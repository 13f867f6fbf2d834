"""What is minimised, and how outputs are measured: a loss and a geometry for one example."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from natgrad import _tree
from natgrad._check import Requirement, aligned, caller, wide_integers
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

    def requirements(self, z: Output, y: PyTree) -> list[Requirement]:
        """What the target of an example must satisfy, for outputs like `z`."""
        del z, y
        return []

    def counted(self, y: PyTree) -> Bool[Array, "..."] | None:
        """Which targets count, for a batch of them; `None` for all."""
        del y
        return None


class Objective(AbstractObjective):
    """Any loss `loss(z, y)` of one example, with any geometry.

    If a batch has weights for positions, `loss` is the loss of one position.

    The two need not belong together: a natural gradient is the gradient of the loss, measured in the geometry.

    ```python
    import jax.numpy as jnp
    import natgrad as ng
    import optax


    def huber(z, y):
        return jnp.sum(optax.huber_loss(z, y))


    objective = ng.Objective(huber, ng.Euclidean())
    opt = ng.NaturalGradient(lambda w, x: x @ w, objective)
    assert jnp.allclose(objective.loss(jnp.array([3.0]), jnp.zeros(1)), 2.5)
    ```
    """

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
    r"""Half the squared residual $\frac12\|z - y\|^2$ in the Euclidean geometry. A target of `None` is zero.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    objective = ng.LeastSquares()
    assert jnp.allclose(objective.loss(jnp.array([3.0, 4.0]), jnp.zeros(2)), 12.5)
    ```
    """

    def loss(self, z, y):
        if y is None:
            return _tree.vdot(z, z) / 2
        if jax.tree.structure(z) != jax.tree.structure(y):
            raise ValueError(
                f"`LeastSquares` needs targets with the structure of the outputs, {jax.tree.structure(z)}, but got "
                f"{jax.tree.structure(y)}."
            )
        residual = jax.tree.map(lambda z, y: z - aligned(y, z.shape, "`LeastSquares`").astype(z.dtype), z, y)
        return _tree.vdot(residual, residual) / 2

    @property
    def geometry(self):
        return Euclidean()

    def requirements(self, z, y):
        is_finite = [jnp.all(jnp.isfinite(leaf)) for leaf in map(jnp.asarray, jax.tree.leaves(y))]
        return [Requirement(holds, "finite targets", "Drop examples without one.") for holds in is_finite]


class Likelihood(AbstractObjective):
    r"""The negative log-likelihood of an exponential family with natural parameters $z$, in its Fisher metric.

    A family given as an objective is turned into it.

    Targets need not be observations: any mean of observations (such as grey pixels under `Bernoulli`) will do.

    **Arguments:**

    - `ignore_label`: a label that stands for no label at all, such as the -100 that pads sequences: its examples or
      positions have weight zero. Only for the categorical families; for others, `Bernoulli` included, use weights.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    objective = ng.Likelihood(ng.Categorical(), ignore_label=-100)
    assert jnp.allclose(objective.loss(jnp.zeros(4), jnp.array(1)), jnp.log(4.0))
    assert objective.counted(jnp.array([1, -100])).tolist() == [True, False]
    ```
    """

    family: AbstractFamily
    ignore_label: int | None = eqx.field(default=None, static=True)

    def __check_init__(self):
        if self.ignore_label is not None and self.family.observation_type is not int:
            raise ValueError(
                f"`Likelihood` can ignore a label of families of labels, such as `Categorical()`, but "
                f"`{type(self.family).__name__}` has none. Give its examples a weight of zero: `(x, y, weights)`."
            )

    def loss(self, z, y):
        wide = _tree.at_least_float32(z)
        return -self.family._log_prob(wide, self.family._target(wide, y))

    @property
    def geometry(self):
        return Fisher(self.family)

    def requirements(self, z, y):
        wide = _tree.at_least_float32(z)
        return self.family._sized(wide)._target_domain(self.family._target(wide, y))

    def counted(self, y):
        if self.ignore_label is None:
            return None
        labels = wide_integers(jnp.asarray(y))
        # A column of labels has no positions.
        while labels.ndim > 1 and labels.shape[-1] == 1:
            labels = labels[..., 0]
        return labels != self.ignore_label


def as_objective(objective: Any) -> AbstractObjective:
    """An objective, or a family as one."""
    if isinstance(objective, AbstractFamily):
        return Likelihood(objective)
    if isinstance(objective, AbstractObjective):
        return objective
    raise TypeError(
        f"{caller()} needs an `objective`: an exponential family, `LeastSquares()`, or `Objective(loss, geometry)`; "
        f"but got `{type(objective).__name__}`."
    )
