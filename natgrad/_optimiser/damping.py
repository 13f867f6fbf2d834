"""What is added to a metric before it is inverted."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from natgrad._check import caller, check_number, is_concrete, number, public
from natgrad._optimiser.by_path import LeafNumbers, by_path, spread
from natgrad._optimiser.info import Info, Quantity
from natgrad._types import Scalar


class DampingMatrix(NamedTuple):
    r"""The diagonal matrix $D$ that is added to a metric.

    `strength` (`None` without damping) times a multiplier for every parameter, plus the `l2` coefficient of every
    parameter. With `is_relative` the first part is also multiplied by the diagonal of the metric. `sizes` are the
    numbers of entries of the parameters.

    ```python
    import jax
    import natgrad as ng


    def identity_direction(covector, damping):
        # The `direction` of a structure with the identity for a metric: every parameter has damping of its own.
        leaves, tree = jax.tree.flatten(covector)
        return jax.tree.unflatten(tree, [g / (1 + damping.of_leaf(k)) for k, g in enumerate(leaves)])
    ```
    """

    strength: Any | None
    multipliers: LeafNumbers
    l2: LeafNumbers
    is_relative: bool
    sizes: tuple[int, ...]

    def of_leaf(self, leaf: int) -> Any:
        """What is added to the diagonal at a parameter, besides what is relative to it."""
        return (0.0 if self.is_relative else self._damping(leaf)) + self.l2.at(leaf)

    @property
    def is_zero(self) -> bool:
        """Whether it is known while a step is traced that nothing is added."""
        return self.strength is None and self.l2.is_default

    @property
    def is_uniform(self) -> bool:
        """Whether the same number is added everywhere."""
        return not self.is_relative and self.multipliers.is_uniform and self.l2.is_uniform

    def is_shared(self, leaves: Sequence[int]) -> bool:
        """Whether some parameters have the same multiplier and `l2`."""
        return len({(self.multipliers.indices[leaf], self.l2.indices[leaf]) for leaf in leaves}) <= 1

    def entries(self, diagonal: Float[Array, " P"] | None = None) -> Any:
        """What is added to every entry of the diagonal, as one number if all are equal. Relative damping needs the
        diagonal of the metric."""
        if self.is_uniform:
            return self.of_leaf(0)
        leaves = range(len(self.sizes))
        fixed = spread([self.of_leaf(leaf) for leaf in leaves], self.sizes)
        if not self.is_relative:
            return fixed
        assert diagonal is not None
        relative = spread([self._damping(leaf) for leaf in leaves], self.sizes)
        return (fixed + relative * diagonal.astype(fixed.dtype)).astype(diagonal.dtype)

    def of_block(self, leaf: int) -> Any:
        """What is added to a block that holds a parameter; with relative damping, in units of the block's diagonal."""
        return self._damping(leaf) if self.is_relative else self.of_leaf(leaf)

    def penalties(self) -> Any:
        """The `l2` coefficient of every entry, one number if they are the same."""
        if self.l2.is_uniform:
            return self.l2.at(0)
        return spread([self.l2.at(leaf) for leaf in range(len(self.sizes))], self.sizes)

    def _damping(self, leaf: int) -> Any:
        return 0.0 if self.strength is None else self.strength * self.multipliers.at(leaf)


class Reduction(NamedTuple):
    """Losses and predicted decrease of a step. Decreases below `rounding` carry no information.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    damping = ng.LevenbergMarquardt(initial=1.0, every=1)
    state = damping.start(damping.init(), jnp.array(1.0))
    known = lambda value: ng.Quantity(jnp.array(value), jnp.array(True))
    reduction = ng.Reduction(jnp.array(0), jnp.array(3.0), known(2.9), known(2.0), jnp.array(False), jnp.array(1e-6))
    assert damping.update(state, reduction).strength > 1  # the loss fell by 0.1 instead of 2
    ```
    """

    steps: Int[Array, ""]
    loss: Scalar
    loss_after: Quantity
    predicted_decrease: Quantity
    is_rejected: Bool[Array, ""]
    rounding: Scalar

    @classmethod
    def of(cls, info: Info, steps: Int[Array, ""], rounding: Scalar) -> "Reduction":
        return cls(steps, info.loss, info.loss_after, info.predicted_decrease, ~info.accepted, rounding)


class AbstractDamping(eqx.Module):
    """How much is added to a metric, step by step.

    The strength may start from the mean eigenvalue of the metric on the first batch. `shape` is what it multiplies: the
    `"identity"`, or the `"diagonal"` of the metric, which makes steps independent of the units of parameters.
    `multipliers` are factors for the parameters at or below a path.

    A subclass states `strength`; one whose strength follows the run also `init` and `update`.

    ```python
    import jax.numpy as jnp
    import natgrad as ng


    class Decaying(ng.AbstractDamping):
        # Damping that is halved every `half_life` steps.

        half_life: float = 10.0

        def strength(self, state, steps):
            return 0.5 ** (steps / self.half_life)


    assert jnp.allclose(Decaying().strength((), jnp.array(20)), 0.25)
    opt = ng.NaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), damping=Decaying())
    ```
    """

    shape: str = eqx.field(default="identity", kw_only=True, static=True)
    multipliers: Any = eqx.field(default=None, kw_only=True, converter=by_path(1.0))

    @public
    def __check_init__(self):
        name = type(self).__name__
        if self.shape not in ("identity", "diagonal"):
            raise ValueError(f'`{name}` needs a `shape` of "identity" or "diagonal", but got {self.shape!r}.')
        self.multipliers.check("multipliers", above=0)

    def init(self) -> PyTree:
        """A state of the right shapes. Only these are used: a run starts from zeros."""
        return ()

    def start(self, state: PyTree, mean_eigenvalue: Scalar) -> PyTree:
        """The state once the metric of the first batch is known."""
        del mean_eigenvalue
        return state

    @abstractmethod
    def strength(self, state: PyTree, steps: Int[Array, ""]) -> Any:
        """What to multiply the identity, or the diagonal of the metric, by; `None` for no damping at all."""

    def update(self, state: PyTree, outcome: Reduction) -> PyTree:
        """The state after a step."""
        del outcome
        return state

    def wants_loss_after(self, steps: Int[Array, ""]) -> Bool[Array, ""] | bool:
        """Whether the loss after this step, and the decrease that was predicted, are needed."""
        del steps
        return False

    @property
    def is_adaptive(self) -> bool:
        """Whether `update` looks at the decrease of the loss."""
        return False

    @property
    def needs_mean(self) -> bool:
        """Whether the mean eigenvalue of the metric is needed at the first step."""
        return False

    def matrix(self, strength: Any, l2: LeafNumbers, names: tuple[str, ...], sizes: tuple[int, ...]) -> DampingMatrix:
        """What is added to the metric of parameters with some names and sizes."""
        return DampingMatrix(
            strength, self.multipliers.of_leaves(names, "multipliers"), l2, self.shape == "diagonal", sizes
        )


class NoDamping(AbstractDamping):
    """No damping: the metric is solved with as it is.

    This needs a structure that can (`Exact` uses a pseudo-inverse). `ConstantDamping(0.0)` is turned into it.

    ```python
    import natgrad as ng

    ng.NaturalGradient(lambda w, x: x @ w, ng.Bernoulli(), ng.Exact(), ng.NoDamping(), step=ng.ConstantStep(1.0))
    ```
    """

    def strength(self, state, steps):
        return None


class ConstantDamping(AbstractDamping):
    """Damping of a given strength.

    **Arguments:**

    - `value`: a number, or a schedule from optax (a function of the number of steps). By default the mean eigenvalue of
      the metric of the first batch, times `scale`.
    - `shape`: what the strength multiplies: the `"identity"`, or the `"diagonal"` of the metric, which makes steps
      independent of the units of parameters.
    - `multipliers`: factors for the parameters at or below a path.

    ```python
    import jax.numpy as jnp
    import natgrad as ng
    import optax

    damping = ng.ConstantDamping(0.1, shape="diagonal")
    assert jnp.allclose(damping.strength(damping.init(), jnp.array(0)), 0.1)
    scheduled = ng.ConstantDamping(optax.exponential_decay(1.0, transition_steps=10, decay_rate=0.5))
    assert jnp.allclose(scheduled.strength(scheduled.init(), jnp.array(10)), 0.5)
    ```
    """

    value: Any = number(None)
    scale: Any = number(1.0)

    @public
    def __check_init__(self):
        if self.value is not None:
            check_number(self.value, "`value`", least=0, schedules=True)
        check_number(self.scale, "`scale`", above=0)

    def init(self):
        return jnp.zeros(()) if self.value is None else ()

    def start(self, state, mean_eigenvalue):
        return self.scale * mean_eigenvalue if self.value is None else state

    def strength(self, state, steps):
        if self.value is None:
            return state
        return self.value(steps) if callable(self.value) else self.value

    @property
    def needs_mean(self):
        return self.value is None


class LevenbergMarquardtState(NamedTuple):
    strength: Scalar
    minimum: Scalar
    maximum: Scalar


class LevenbergMarquardt(AbstractDamping):
    r"""Damping that follows how well steps are predicted.

    Every so many steps the actual decrease of the loss is compared with the decrease that the quadratic model predicts.
    Damping is multiplied by $\omega = $ `decay`$^{every}$ if their ratio is above `high`, and divided by $\omega$ if it
    is below `low`. A rejected step multiplies damping by `growth` at once.

    **Arguments:**

    - `initial`: where to start. By default at the mean eigenvalue of the metric of the first batch, which needs no
      tuning since it has the units of the metric.
    - `minimum`, `maximum`: limits of the damping. By default the mean eigenvalue times the machine epsilon, and divided
      by it.
    - `shape`, `multipliers`: as for `ConstantDamping`.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0], [2.0]])
    opt = ng.NaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), damping=ng.LevenbergMarquardt(initial=0.5, every=1))
    w, batch = jnp.zeros((1, 1)), (x, 3 * x)
    w, state, info = jax.jit(opt.step)(w, opt.init(w, batch), batch)
    assert jnp.allclose(info.damping, 0.5)
    assert jnp.allclose(state.damping.strength, 0.45)  # the step was predicted well
    ```
    """

    initial: Any = number(None)
    decay: Any = number(0.9)
    every: int = eqx.field(default=5, static=True)
    low: Any = number(0.25)
    high: Any = number(0.75)
    growth: Any = number(4.0)
    minimum: Any = number(None)
    maximum: Any = number(None)

    @public
    def __check_init__(self):
        if self.initial is not None:
            hint = "(from 0 no factor leads away; use `NoDamping()` for none)"
            check_number(self.initial, f"`initial` {hint}", above=0)
        for name in ("minimum", "maximum"):
            if getattr(self, name) is not None:
                check_number(getattr(self, name), f"`{name}`", least=0)
        check_number(self.decay, "`decay`", above=0, below=1)
        check_number(self.growth, "`growth`", above=1)
        check_number(self.high, "`high`")
        check_number(self.low, "`low`, which is less than `high`,", below=self.high)
        if not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"{caller()} needs `every` to be a whole number of at least 1, but got {self.every}.")

    def init(self):
        return LevenbergMarquardtState(jnp.zeros(()), jnp.zeros(()), jnp.zeros(()))

    def start(self, state, mean_eigenvalue):
        mean = mean_eigenvalue.astype(state.strength.dtype)

        def given(value, default):
            return default if value is None else jnp.asarray(value, mean.dtype)

        rounding = jnp.finfo(mean.dtype).eps
        minimum, maximum = given(self.minimum, rounding * mean), given(self.maximum, mean / rounding)
        return LevenbergMarquardtState(jnp.clip(given(self.initial, mean), minimum, maximum), minimum, maximum)

    def strength(self, state, steps):
        return state.strength

    def update(self, state, outcome):
        omega = self.decay**self.every
        predicted, after = outcome.predicted_decrease, outcome.loss_after
        # Near the minimum both decreases are rounding, and their ratio says nothing.
        is_told = predicted.is_known & after.is_known & (predicted.value > outcome.rounding)
        ratio = (outcome.loss - after.value) / jnp.where(is_told, predicted.value, 1.0)
        is_told &= jnp.isfinite(ratio) & self.wants_loss_after(outcome.steps)
        factor = jnp.where(ratio > self.high, omega, jnp.where(ratio < self.low, 1 / omega, 1.0))
        factor = jnp.where(outcome.is_rejected, self.growth, jnp.where(is_told, factor, 1.0))
        strength = jnp.clip(factor.astype(state.strength.dtype) * state.strength, state.minimum, state.maximum)
        return state._replace(strength=strength)

    def wants_loss_after(self, steps):
        return (steps + 1) % self.every == 0

    @property
    def is_adaptive(self):
        return True

    @property
    def needs_mean(self):
        return True


def without_zero(damping: AbstractDamping) -> AbstractDamping:
    """The damping, or `NoDamping()` where it is a constant zero: solvers have to know that while a step is traced."""
    value = damping.value if isinstance(damping, ConstantDamping) else None
    is_zero = value is not None and not callable(value) and is_concrete(value) and float(value) == 0
    return NoDamping() if is_zero else damping
