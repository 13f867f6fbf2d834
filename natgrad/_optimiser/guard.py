"""Guards a run against divergence: which losses are out of the ordinary, and whether a step is taken, rejected or taken
back."""

from abc import abstractmethod
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from natgrad import _tree
from natgrad._check import check_number, number, public
from natgrad._optimiser.momentum import Flat
from natgrad._optimiser.step.base import Expansion, Proposal, dot
from natgrad._types import Scalar


class Soundness(NamedTuple):
    """Whether a step may be taken.

    `is_finite`: loss and gradient are finite, and the last step did not make the loss diverge. `is_valid`: every target
    is in the domain of its objective, and some example has a weight above zero. `is_coupled`: some output depends on
    other examples of the batch; no step is taken then.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    yes, no = jnp.array(True), jnp.array(False)
    assert ng.Soundness(is_finite=yes, is_valid=yes, is_coupled=no).is_sound
    assert not ng.Soundness(is_finite=no, is_valid=yes, is_coupled=no).is_sound
    ```
    """

    is_finite: Bool[Array, ""]
    is_valid: Bool[Array, ""]
    is_coupled: Bool[Array, ""]

    @property
    def is_sound(self) -> Bool[Array, ""]:
        return self.is_finite & self.is_usable

    @property
    def is_usable(self) -> Bool[Array, ""]:
        """Whether the batch is one to take a step on."""
        return self.is_valid & ~self.is_coupled


class Trial(NamedTuple):
    """A step on which a guard decides.

    The cost around the parameters, the proposed step, the update before it (`None` without momentum), whether the batch
    is sound, and whether the last step was rejected.

    ```python
    import jax.numpy as jnp
    import natgrad as ng


    class Fearless(ng.AbstractGuard):
        # Takes every step.

        def conclude(self, state, trial):
            w, last = trial.next
            return ng.Conclusion(w, last, jnp.array(True), jnp.array(False), state)


    opt = ng.NaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), guard=Fearless())
    ```
    """

    expansion: Expansion
    proposal: Proposal
    last: Flat | None
    soundness: Soundness
    was_rejected: Bool[Array, ""]

    @property
    def now(self) -> tuple[Flat, Flat | None]:
        """The parameters and the last update if the step is not taken."""
        return self.expansion.w, self.last

    @property
    def next(self) -> tuple[Flat, Flat | None]:
        """The parameters and the last update if the step is taken."""
        moved = self.expansion.w + self.proposal.update + self.proposal.beside
        return moved, None if self.last is None else self.proposal.update


class Conclusion(NamedTuple):
    """The decision of a guard on a step.

    The parameters and the last update from here on, whether the step was accepted, whether the run has failed, and the
    new state of the guard.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    w, stay = jnp.ones(2), jnp.array(False)
    conclusion = ng.Conclusion(w, last=None, is_accepted=stay, is_given_up=jnp.array(False), state=())
    assert not conclusion.is_accepted and jnp.allclose(conclusion.w, 1.0)
    ```
    """

    w: Flat
    last: Flat | None
    is_accepted: Bool[Array, ""]
    is_given_up: Bool[Array, ""]
    state: PyTree


class AbstractGuard(eqx.Module):
    """A rule that decides whether a step is taken.

    A guard may ask for the loss of the batch at the parameters before the last step, to see whether that step is to
    blame for a loss that is out of the ordinary.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng


    class ShortSteps(ng.AbstractGuard):
        # Rejects steps that are longer than one.

        def conclude(self, state, trial):
            is_short = jnp.linalg.norm(trial.proposal.update) <= 1
            is_accepted = trial.soundness.is_sound & trial.proposal.is_accepted & is_short
            w, last = jax.tree.map(lambda new, old: jnp.where(is_accepted, new, old), trial.next, trial.now)
            return ng.Conclusion(w, last, is_accepted, is_given_up=jnp.array(False), state=state)


    x = jnp.array([[1.0], [2.0]])
    w, batch = jnp.zeros((1, 1)), (x, 3 * x)
    opt = ng.NaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), guard=ShortSteps())
    w, state, info = jax.jit(opt.step)(w, opt.init(w, batch), batch)
    assert not info.accepted and jnp.allclose(w, 0.0)  # the step would have been 1.5
    ```
    """

    def init(self, w: Flat, last: Flat | None) -> PyTree:
        """A state of the right shapes, for parameters and a last update. A run starts from zeros of these shapes."""
        del w, last
        return ()

    def is_suspicious(self, state: PyTree, loss: Scalar) -> Bool[Array, ""]:
        """Whether a loss is out of the ordinary, by its batch or because of the last step."""
        del state, loss
        return jnp.array(False)

    def before(self, state: PyTree) -> Flat | None:
        """The parameters before the last step, if a suspicious loss is to be compared with the loss there."""
        del state
        return None

    def is_diverging(self, state: PyTree, loss: Scalar, loss_before: Scalar) -> Bool[Array, ""]:
        """Whether the last step is to blame for a suspicious loss, given that before it on the same batch."""
        del state, loss, loss_before
        return jnp.array(False)

    def rounding(self, state: PyTree, loss: Scalar) -> Scalar:
        """How much a loss may rise by rounding alone."""
        del state
        return 10 * jnp.finfo(loss.dtype).eps * jnp.abs(loss)

    @abstractmethod
    def conclude(self, state: PyTree, trial: Trial) -> Conclusion:
        """Decide on a step."""


class NoGuard(AbstractGuard):
    """Takes every step that the step rule accepts, also where the loss is not finite or rises.

    It stores nothing. Only batches that cannot be used (an invalid target, coupled examples) are left out.

    ```python
    import natgrad as ng

    ng.NaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), step=ng.ConstantStep(0.1), guard=ng.NoGuard())
    ```
    """

    def conclude(self, state, trial):
        is_accepted = trial.soundness.is_usable & trial.proposal.is_accepted
        w, last = _tree.where(is_accepted, trial.next, trial.now)
        return Conclusion(w, last, is_accepted, jnp.array(False), state)


class RollbackState(NamedTuple):
    """Whether there was a sound step yet; the loss of the first; running averages of the loss and of its spread; the
    parameters and the update before the last step; and how many steps were rejected without two in a row that were
    not."""

    is_started: Bool[Array, ""]
    first: Scalar
    mean: Scalar
    spread: Scalar
    before: tuple[Flat, Flat | None]
    rejections: Int[Array, ""]


class Rollback(AbstractGuard):
    """Takes back steps that make the loss diverge.

    It goes back to the parameters before the last step where the loss or its gradient is not finite, or where that step
    has raised the loss of the same batch far beyond the usual spread of losses. Steps that would not be finite, or that
    the step rule does not accept, are not taken.

    **Arguments:**

    - `max_rejections`: how many steps in a row may be rejected before `info.result` says that the run has failed.
    - `threshold`: how many times its usual spread a loss has to be above its mean for the last step to be looked at.
    - `decay`: of the running averages of the loss and its spread.

    ```python
    import natgrad as ng

    ng.NaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), guard=ng.Rollback(max_rejections=50))
    ```
    """

    max_rejections: int = eqx.field(default=10, static=True)
    threshold: Any = number(3.0)
    decay: Any = number(0.9)

    @public
    def __check_init__(self):
        if type(self.max_rejections) is not int or self.max_rejections < 0:
            raise ValueError(
                f"`Rollback` needs `max_rejections` to be a whole number of at least 0, but got {self.max_rejections}."
            )
        check_number(self.threshold, "`threshold`", above=0)
        check_number(self.decay, "`decay`", least=0, below=1)

    def init(self, w, last):
        zero = jnp.zeros(())
        return RollbackState(jnp.array(False), zero, zero, zero, (w, last), jnp.array(0))

    def is_suspicious(self, state, loss):
        return state.is_started & self._is_far_above(state, loss, state.mean)

    def before(self, state):
        return state.before[0]

    def is_diverging(self, state, loss, loss_before):
        return self._is_far_above(state, loss, loss_before)

    def rounding(self, state, loss):
        """Relative to the loss, and where that vanishes, as squares do, to what it was at first."""
        eps = jnp.finfo(loss.dtype).eps
        return 10 * eps * jnp.abs(loss) + 100 * eps**2 * jnp.abs(state.first).astype(loss.dtype)

    def conclude(self, state, trial):
        """Take the step; or stay; or, where loss or gradient are not sound, go back to where the last step started. A
        batch on which no step can be taken says nothing of the last step."""
        expansion, proposal, soundness = trial.expansion, trial.proposal, trial.soundness
        is_finite = jnp.isfinite(dot(proposal.update, proposal.update))
        is_accepted = soundness.is_sound & proposal.is_accepted & is_finite
        can_go_back = ~soundness.is_sound & soundness.is_usable & (expansion.steps > 0)
        w, last = _tree.where(is_accepted, trial.next, _tree.where(can_go_back, state.before, trial.now))
        is_new = is_accepted | (expansion.steps == 0)
        before = _tree.where(is_new, trial.now, state.before)
        # A step that is accepted may yet be taken back by the next.
        unless_back = jnp.where(trial.was_rejected, state.rejections, 0)
        rejections = jnp.where(is_accepted, unless_back, state.rejections + 1)
        new = self._with_loss(state, expansion.loss, soundness.is_sound)
        new = new._replace(before=before, rejections=rejections)
        return Conclusion(w, last, is_accepted, rejections > self.max_rejections, new)

    def _is_far_above(self, state: RollbackState, loss: Scalar, other: Scalar) -> Bool[Array, ""]:
        value = loss.astype(state.mean.dtype)
        slack = self.threshold * state.spread + self.rounding(state, loss).astype(value.dtype)
        return value > other.astype(value.dtype) + slack

    def _with_loss(self, state: RollbackState, loss: Scalar, is_sound: Bool[Array, ""]) -> RollbackState:
        """The averages with the loss of one more step, if that was sound."""
        value = jnp.where(is_sound, loss.astype(state.mean.dtype), state.mean)
        is_first = is_sound & ~state.is_started

        def averaged(old, new):
            return jnp.where(is_sound, self.decay * old + (1 - self.decay) * new, old)

        return state._replace(
            is_started=state.is_started | is_sound,
            first=jnp.where(is_first, value, state.first),
            mean=jnp.where(is_first, value, averaged(state.mean, value)),
            # At first, for want of more, as large as the loss.
            spread=jnp.where(is_first, jnp.abs(value), averaged(state.spread, jnp.abs(value - state.mean))),
        )
