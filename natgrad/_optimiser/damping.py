"""What is added to a metric before it is inverted."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from natgrad._check import caller, check_number, public
from natgrad._optimiser.info import Info, Quantity
from natgrad._tree import check_paths, option_for
from natgrad._types import Scalar


class DampingMatrix(NamedTuple):
    r"""The diagonal matrix $D$ that is added to a metric: `strength` times a number for every parameter, plus the `l2`
    coefficient of every parameter. With `is_relative` the first part is also multiplied by the diagonal of the metric.
    `sizes` are those of the parameters."""

    strength: Any
    multipliers: tuple[float, ...]
    l2: tuple[float, ...]
    is_relative: bool
    sizes: tuple[int, ...]

    def of_leaf(self, leaf: int) -> Any:
        """What is added to the diagonal at a parameter, besides what is relative to it."""
        own = 0.0 if self.is_relative else self.strength * self.multipliers[leaf]
        return own + self.l2[leaf]

    @property
    def is_uniform(self) -> bool:
        """Whether the same number is added everywhere."""
        return not self.is_relative and len(set(self.multipliers)) == len(set(self.l2)) == 1

    def entries(self, diagonal: Float[Array, " P"] | None = None) -> Any:
        """What is added to every entry, one number if that is the same, given the diagonal of the metric where it is
        relative to that."""
        if self.is_uniform:
            return self.of_leaf(0)
        fixed = self._spread([self.of_leaf(leaf) for leaf in range(len(self.sizes))])
        if not self.is_relative:
            return fixed
        assert diagonal is not None
        relative = self._spread([self.strength * m for m in self.multipliers])
        return (fixed + relative * diagonal.astype(fixed.dtype)).astype(diagonal.dtype)

    def penalties(self) -> Any:
        """The `l2` coefficient of every entry, one number if they are the same."""
        return self.l2[0] if len(set(self.l2)) == 1 else self._spread(self.l2)

    def _spread(self, values: Sequence[Any]) -> Float[Array, " P"]:
        parts = zip(values, self.sizes, strict=True)
        return jnp.concatenate([jnp.full(size, jnp.asarray(value, float)) for value, size in parts])


class Reduction(NamedTuple):
    """What came of a step. Decreases below `rounding` say nothing."""

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
    `multipliers` are factors for the parameters at or below a path."""

    shape: str = eqx.field(default="identity", kw_only=True)
    multipliers: Mapping[str, float] | None = eqx.field(default=None, kw_only=True)

    def __check_init__(self):
        name = type(self).__name__
        if self.shape not in ("identity", "diagonal"):
            raise ValueError(f'`{name}` needs a `shape` of "identity" or "diagonal", but got {self.shape!r}.')
        for path, factor in (self.multipliers or {}).items():
            check_number(factor, f"`multipliers[{path!r}]`", above=0)

    def init(self) -> PyTree:
        """The state before the first step."""
        return ()

    def start(self, state: PyTree, mean_eigenvalue: Scalar) -> PyTree:
        """The state once the metric of the first batch is known."""
        del mean_eigenvalue
        return state

    @abstractmethod
    def strength(self, state: PyTree, steps: Int[Array, ""]) -> Any: ...

    def update(self, state: PyTree, outcome: Reduction) -> PyTree:
        del outcome
        return state

    def wants_loss_after(self, steps: Int[Array, ""]) -> Bool[Array, ""] | bool:
        """Whether the loss after this step, and the decrease that was predicted, are needed."""
        del steps
        return False

    @property
    def is_adaptive(self) -> bool:
        return False

    @property
    def needs_mean(self) -> bool:
        """Whether the mean eigenvalue of the metric is needed at the first step."""
        return False

    def added(
        self, strength: Any, l2: tuple[float, ...], names: tuple[str, ...], sizes: tuple[int, ...]
    ) -> DampingMatrix:
        chosen = self.multipliers or {}
        check_paths(chosen, names, "multipliers")
        each = [option_for(chosen, name) for name in names]
        multipliers = tuple(1.0 if m is None else float(m) for m in each)
        return DampingMatrix(strength, multipliers, l2, self.shape == "diagonal", sizes)


class ConstantDamping(AbstractDamping):
    """Damping of a given strength.

    **Arguments:**

    - `value`: a number, or a schedule from optax (a function of the number of steps). By default the mean eigenvalue of
      the metric of the first batch, times `scale`.
    - `shape`: what the strength multiplies: the `"identity"`, or the `"diagonal"` of the metric, which makes steps
      independent of the units of parameters.
    - `multipliers`: factors for the parameters at or below a path."""

    value: Any = None
    scale: float = 1.0

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
    r"""Damping that follows how well steps are predicted: every so many steps the decrease of the loss is compared with
    that of the quadratic model, and damping falls by $\omega = $ `decay`$^{every}$ if their ratio is above `high`,
    rises by $1/\omega$ if it is below `low`. A rejected step raises it by `growth` at once.

    **Arguments:**

    - `initial`: where to start. By default at the mean eigenvalue of the metric of the first batch, which needs no
      tuning since it has the units of the metric.
    - `minimum`, `maximum`: where to stop. By default at the part of the mean eigenvalue that is lost in rounding, and
      at that of which the mean eigenvalue is lost.
    - `shape`, `multipliers`: as for `ConstantDamping`.
    """

    initial: float | None = None
    decay: float = 0.9
    every: int = 5
    low: float = 0.25
    high: float = 0.75
    growth: float = 4.0
    minimum: float | None = None
    maximum: float | None = None

    @public
    def __check_init__(self):
        if self.initial is not None:
            hint = "(from 0 no factor leads away; use `ConstantDamping(0.0)` for none)"
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
        given = lambda value, default: default if value is None else jnp.asarray(value, mean.dtype)
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
