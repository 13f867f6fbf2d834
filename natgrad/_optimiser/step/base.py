"""How far to go along a direction."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from natgrad import _tree
from natgrad._optimiser.damping.base import Added
from natgrad._optimiser.evaluation import Evaluation
from natgrad._optimiser.momentum import AbstractMomentum, NoMomentum
from natgrad._types import Scalar


class Context(NamedTuple):
    """What a step rule may look at: the point, the natural gradient (downhill), the last update, and the problem."""

    params: PyTree
    loss: Scalar
    gradient: PyTree
    direction: PyTree
    last: PyTree
    momentum: Any
    count: Int[Array, ""]
    evaluation: Evaluation
    added: Added
    diagonal: PyTree | None
    loss_at: Callable[[PyTree], Scalar]

    def update(self, step_size: Any, momentum: Any) -> PyTree:
        """So much of the direction, and of the last update."""
        if isinstance(momentum, float) and momentum == 0:
            return _tree.scale(step_size, self.direction)
        return _tree.combine([step_size, momentum], [self.direction, self.last])

    def moved(self, update: PyTree) -> PyTree:
        return jax.tree.map(jnp.add, self.params, update)

    def quadratic(self, vectors: Sequence[PyTree]) -> "Quadratic":
        """The quadratic model of the loss on the span of some vectors, with the exact metric."""
        pairs = lambda mv: jnp.stack([jnp.stack([_tree.vdot(u, mv(v)) for v in vectors]) for u in vectors])
        only_l2 = self.added._replace(strength=0.0)
        metric = self.evaluation.inner_products(vectors)
        penalty = pairs(lambda v: only_l2.mv(v, self.diagonal)) if any(self.added.l2) else jnp.zeros_like(metric)
        damping = pairs(lambda v: self.added.mv(v, self.diagonal))
        slope = jnp.stack([_tree.vdot(self.gradient, v) for v in vectors])
        return Quadratic(*(part.astype(slope.dtype) for part in (metric, metric + penalty, metric + damping)), slope)


class Quadratic(NamedTuple):
    r"""$c \mapsto b^\top c + \frac12 c^\top H c$ for the coefficients of some vectors: with the metric alone, with the
    curvature of `l2` too, and with all damping."""

    metric: Float[Array, "k k"]
    curvature: Float[Array, "k k"]
    damped: Float[Array, "k k"]
    slope: Float[Array, " k"]

    def decrease(self, c: Float[Array, " k"]) -> Scalar:
        """By how much the loss would fall."""
        return -(self.slope @ c + c @ self.curvature @ c / 2)

    def divergence(self, c: Float[Array, " k"]) -> Scalar:
        return c @ self.metric @ c / 2

    def cosine(self, c: Float[Array, " k"]) -> Scalar:
        r"""Of the angle to the natural gradient, the first of the vectors standing for it:
        $-g(d)\,/\,|d|_{G+D}\,|g|_{(G+D)^{-1}}$."""
        length = jnp.sqrt(jnp.maximum(c @ self.damped @ c, 0.0))
        steepest = jnp.sqrt(jnp.maximum(-self.slope[0], 0.0))
        return -(self.slope @ c) / jnp.where(length * steepest > 0, length * steepest, 1.0)


class Proposal(NamedTuple):
    """A step that a rule would take. What it did not compute is `None`."""

    update: PyTree
    step_size: Any
    momentum: Any
    is_accepted: Bool[Array, ""] | bool = True
    loss_after: Any = None
    predicted_decrease: Any = None
    divergence: Any = None
    predicted_divergence: Any = None
    cosine: Any = None


class AbstractStep(eqx.Module):
    """A rule for how far to go along the natural gradient."""

    @abstractmethod
    def propose(self, context: Context) -> Proposal: ...

    @property
    def momentum(self) -> AbstractMomentum:
        """What goes with the rule, if nothing else is asked for."""
        return NoMomentum()

    @property
    def finds_momentum(self) -> bool:
        """Whether the rule can choose the momentum."""
        return False

    @property
    def keeps_learning_rate(self) -> bool:
        """Whether the step size is given, so that weight decay has one to be multiplied by."""
        return False

    @property
    def compares_losses(self) -> bool:
        """Whether steps are accepted by their loss, which has to be that of the same batch."""
        return False


def scheduled(value: Any, count: Int[Array, ""]) -> Any:
    return value(count) if callable(value) else value


def check_positive(value: Any, name: str, subject: str) -> None:
    if not callable(value) and not value > 0:
        raise ValueError(f"{subject} needs `{name}` to be a number above 0 or a schedule, but got {value}.")
