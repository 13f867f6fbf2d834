"""Which parts of an optimiser go together, and why others do not."""

from typing import Any

from natgrad._optimiser.damping import AbstractDamping
from natgrad._optimiser.momentum import AbstractMomentum, HeavyBall, NoMomentum, Spring
from natgrad._optimiser.step.base import AbstractStep
from natgrad._optimiser.structure.base import AbstractStructure


def check_types(**parts: tuple[Any, type, str]) -> None:
    """Refuse parts of the wrong kind: `name=(given, kind, examples)`."""
    for name, (given, kind, examples) in parts.items():
        if not isinstance(given, kind):
            hint = f" Write `{given.__name__}()`." if isinstance(given, type) and issubclass(given, kind) else ""
            shown = getattr(given, "__name__", type(given).__name__)
            raise TypeError(f"`NaturalGradient` needs `{name}` to be {examples}, but got `{shown}`.{hint}")


def check_together(
    structure: AbstractStructure,
    damping: AbstractDamping,
    step: AbstractStep,
    momentum: AbstractMomentum,
    *,
    has_l2: bool,
    has_weight_decay: bool,
    micro_batches: int,
) -> None:
    """Refuse combinations that make no sense, with the reason."""
    rule = type(step).__name__
    if isinstance(momentum, HeavyBall) and momentum.decay is None and not step.finds_momentum:
        raise ValueError(
            f"`HeavyBall(None)` leaves its factor to the step rule, but `{rule}` does not find one. Use "
            "`QuadraticModel()`, or give a `decay`."
        )
    if isinstance(momentum, HeavyBall) and step.compares_losses:
        raise ValueError(
            f"`{rule}` searches along one direction, to which `HeavyBall` would add another that it has not looked at. "
            "Use `Spring`, which changes the direction itself, or `NoMomentum`."
        )
    if step.averages and not isinstance(momentum, NoMomentum):
        raise ValueError(
            f"`{rule}` averages natural gradients itself, and what new batches say of the average would not be "
            f"true of what `{type(momentum).__name__}` makes of it. Use `NoMomentum`, which is its default."
        )
    if isinstance(momentum, Spring) and _is_zero(damping) and not has_l2:
        raise ValueError(
            "`Spring` keeps the last update where damping decides, and `ConstantDamping(0.0)` decides nowhere. Give "
            "some damping, or use `NoMomentum`."
        )
    if has_weight_decay and not step.keeps_learning_rate:
        raise ValueError(
            f"`weight_decay` is a part of the learning rate, but `{rule}` finds its step size by a model of the loss, "
            "which knows nothing of it. Use `l2`, which enters loss, metric and model."
        )
    if has_weight_decay and has_l2:
        raise ValueError("`l2` and `weight_decay` would shrink the parameters twice. Use one of them.")
    if not isinstance(micro_batches, int) or micro_batches < 1:
        raise ValueError(f"`micro_batches` needs a whole number of at least 1, but got {micro_batches}.")


def _is_zero(damping: AbstractDamping) -> bool:
    value = getattr(damping, "value", None)
    return isinstance(value, int | float) and value == 0
