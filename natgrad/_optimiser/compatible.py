"""Which parts of an optimiser go together, and why others do not."""

from typing import Any

from natgrad._check import caller
from natgrad._optimiser.damping import AbstractDamping, ConstantDamping, LevenbergMarquardt, NoDamping
from natgrad._optimiser.momentum import AbstractMomentum, HeavyBall, NoMomentum, Spring
from natgrad._optimiser.penalty import L2, AbstractPenalty, WeightDecay
from natgrad._optimiser.step.base import AbstractStep
from natgrad._optimiser.structure.base import AbstractStructure
from natgrad._point.batch import Batch


def check_types(**parts: tuple[Any, Any, str]) -> None:
    """Refuse parts of the wrong kind: `name=(given, kind, examples)`."""
    for name, (given, kind, examples) in parts.items():
        if not isinstance(given, kind):
            hint = f" Write `{given.__name__}()`." if isinstance(given, type) and issubclass(given, kind) else ""
            shown = getattr(given, "__name__", type(given).__name__)
            raise TypeError(f"`NaturalGradient` needs `{name}` to be {examples}, but got `{shown}`.{hint}")


def suitable_damping(structure: AbstractStructure, rule: AbstractStep) -> AbstractDamping:
    """What damping suits a structure and a step rule, if nothing else is asked for."""
    if not structure.is_damped:
        return NoDamping()
    return ConstantDamping() if rule.keeps_damping else LevenbergMarquardt()


def check_together(
    damping: AbstractDamping,
    step: AbstractStep,
    momentum: AbstractMomentum,
    penalty: AbstractPenalty | None,
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
    has_l2, decays = (isinstance(penalty, kind) and not penalty.value.is_default for kind in (L2, WeightDecay))
    if isinstance(momentum, Spring) and isinstance(damping, NoDamping) and not has_l2:
        raise ValueError(
            "`Spring` keeps the last update where damping decides, and there is none. Give some damping, or use "
            "`NoMomentum`."
        )
    if decays and not step.keeps_learning_rate:
        raise ValueError(
            f"`WeightDecay` is a part of the learning rate, but `{rule}` finds its step size by a model of the loss, "
            "which has no weight decay. Use `penalty=L2(...)`, which enters loss, metric and model."
        )


def check_mask_use(batch: Batch, structure: AbstractStructure) -> None:
    """Refuse a mask that the structure would not use, or without weights that leave the same positions out."""
    if batch.mask is None:
        return
    if not structure.uses_masks:
        raise ValueError(
            f"{caller()} got a batch with a `mask`, which only `KFAC` and `EKFAC` use. Leave positions out by weights "
            "of zero: `(x, y, mask)`."
        )
    if batch.weights is None:
        raise ValueError(
            f"{caller()} got a batch with a `mask` but without weights: the loss would count the positions that the "
            "metric leaves out. Give both: `Batch(x, y, mask, mask=mask)`."
        )
