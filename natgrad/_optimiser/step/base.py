"""How far to go along a direction."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from natgrad._optimiser.info import Quantity
from natgrad._optimiser.momentum import AbstractMomentum, Flat, NoMomentum
from natgrad._types import Scalar


class Expansion(NamedTuple):
    r"""The cost around the parameters $w$, as step rules see it.

    As vectors: its value and gradient, how many steps were taken, the diagonal of the damping $D$ and the part of it
    that is the curvature of `l2`.

    Three functions look further: the loss at other parameters, $u^\top G v$ for all pairs of some vectors with the
    exact metric, and the divergence of the outputs at other parameters.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng


    class Undamped(ng.AbstractStep):
        # The length that minimises the undamped quadratic model along the natural gradient.

        def propose(self, expansion, search):
            d = search.natural
            size = -(expansion.gradient @ d) / expansion.inner_products([d])[0, 0]
            return ng.Proposal(size * d, size, 0.0)


    x = jnp.array([[1.0], [2.0]])
    w, batch = jnp.zeros((1, 1)), (x, 3 * x)
    opt = ng.NaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), damping=ng.ConstantDamping(2.5), step=Undamped())
    w, state, info = jax.jit(opt.step)(w, opt.init(w, batch), batch)
    assert jnp.allclose(w, 3.0)
    ```
    """

    w: Flat
    loss: Scalar
    gradient: Flat
    steps: Int[Array, ""]
    damping: Any
    penalties: Any
    loss_at: Callable[[Flat], Scalar]
    inner_products: Callable[[Sequence[Flat]], Float[Array, "k k"]]
    divergence: Callable[[Flat], Scalar]

    def quadratic(self, *vectors: Flat) -> "Quadratic":
        """The quadratic model of the loss on the span of some vectors, with the exact metric."""

        def products(diagonal):
            return _products(vectors, diagonal).astype(self.loss.dtype)

        metric = self.inner_products(vectors).astype(self.loss.dtype)
        slope = jnp.stack([dot(v, self.gradient) for v in vectors]).astype(self.loss.dtype)
        return Quadratic(metric, metric + products(self.penalties), metric + products(self.damping), slope)


class Search(NamedTuple):
    """Where a step rule may go: along the natural gradient (downhill) and the last update.

    The last update is `None` without momentum, and the coefficient of momentum is `None` if the rule is to find it.
    `memory` is what the rule remembers of earlier steps.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    search = ng.Search(natural=jnp.array([1.0, -2.0]), last=jnp.ones(2), momentum=0.9)
    assert jnp.allclose(search.update(0.5, search.momentum), jnp.array([1.4, -0.1]))
    ```
    """

    natural: Flat
    last: Flat | None
    momentum: Any = 0.0
    memory: PyTree = ()

    def along(self, step_size: Any) -> Flat:
        """So much of the natural gradient."""
        return jnp.asarray(step_size, self.natural.dtype) * self.natural

    def update(self, step_size: Any, momentum: Any) -> Flat:
        """So much of the natural gradient, and of the last update."""
        if self.last is None:
            return self.along(step_size)
        return self.along(step_size) + jnp.asarray(momentum, self.natural.dtype) * self.last


def dot(a: Array, b: Array) -> Array:
    """In full precision, which is not the default of accelerators."""
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _products(vectors: Sequence[Flat], diagonal: Any) -> Float[Array, "k k"]:
    r"""$u^\top D v$ for all pairs."""
    number = jnp.asarray(diagonal, vectors[0].dtype)
    weighed = lambda v: number * v if number.ndim else v
    pairs = {(a, b): dot(u, weighed(v)) for a, u in enumerate(vectors) for b, v in enumerate(vectors) if a <= b}
    rows = [jnp.stack([pairs[min(a, b), max(a, b)] for b in range(len(vectors))]) for a in range(len(vectors))]
    return jnp.stack(rows) if number.ndim else number * jnp.stack(rows)


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

    def cosine(self, c: Float[Array, " k"]) -> Quantity:
        """Of the angle with the first of the vectors, in the damped metric."""
        squared = (c @ self.damped @ c) * self.damped[0, 0]
        is_known = squared > 0
        cosine = (self.damped[0] @ c) / jnp.sqrt(jnp.where(is_known, squared, 1.0))
        return Quantity.of(jnp.clip(cosine, -1.0, 1.0), c.dtype, is_known)


class Proposal(NamedTuple):
    """A step that a rule would take.

    Besides, what changes without becoming momentum, and what to remember if the step is taken. What is never computed
    is `None`; what is computed at some steps only, a `Quantity`.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    search = ng.Search(natural=jnp.array([1.0, -2.0]), last=None)
    proposal = ng.Proposal(0.5 * search.natural, step_size=0.5, momentum=0.0)
    assert proposal.is_accepted and proposal.loss_after is None  # the rule has not computed it
    ```
    """

    update: Flat
    step_size: Any
    momentum: Any
    is_accepted: Bool[Array, ""] | bool = True
    loss_after: Any = None
    predicted_decrease: Any = None
    divergence: Any = None
    predicted_divergence: Any = None
    cosine: Any = None
    beside: Any = 0.0
    memory: PyTree = ()


class AbstractStep(eqx.Module):
    """A rule for how far to go along the natural gradient.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng


    class Signs(ng.AbstractStep):
        # Steps of one length in every coordinate, along the signs of the natural gradient.

        length: float = 0.1

        def propose(self, expansion, search):
            return ng.Proposal(self.length * jnp.sign(search.natural), self.length, 0.0)


    x = jnp.array([[1.0], [2.0]])
    w, batch = jnp.zeros((1, 1)), (x, 3 * x)
    opt = ng.NaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), damping=ng.ConstantDamping(0.1), step=Signs())
    w, state, info = jax.jit(opt.step)(w, opt.init(w, batch), batch)
    assert jnp.allclose(w, 0.1)
    ```
    """

    def init(self, params: Flat) -> PyTree:
        """What the rule remembers, in the right shapes. Only these are used: a run starts from zeros."""
        del params
        return ()

    @abstractmethod
    def propose(self, expansion: Expansion, search: Search) -> Proposal:
        """The step to take, with what was found out about it."""

    def rejected(self, memory: PyTree) -> PyTree:
        """What the rule remembers after a step that was not taken, or taken back."""
        return memory

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
    def keeps_damping(self) -> bool:
        """Whether damping is constant, if nothing else is asked for: a step that suits its own batch proves little."""
        return False

    @property
    def averages(self) -> bool:
        """Whether the rule averages natural gradients itself."""
        return False

    @property
    def compares_losses(self) -> bool:
        """Whether steps are accepted by their loss, which has to be that of the same batch."""
        return False


def scheduled(value: Any, count: Int[Array, ""]) -> Any:
    return value(count) if callable(value) else value
