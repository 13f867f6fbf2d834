"""How a metric is represented from step to step, and solved with."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from natgrad._block.structure_report import StructureReport
from natgrad._check import check_number
from natgrad._optimiser.cost import TermPoint
from natgrad._optimiser.damping import DampingMatrix
from natgrad._types import Key, Scalar


class Direction(NamedTuple):
    r"""The solution of $(G + D)v = g$ by a structure.

    `result`, a member of `STEP_RESULTS`, is what came of the solve; `failures` counts the block inverses that were
    not finite so far; the previous inverse stayed in use.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    direction = ng.Direction({"w": jnp.ones(2)}, ng.STEP_RESULTS.successful, failures=jnp.array(0))
    assert direction.result == ng.STEP_RESULTS.successful
    ```
    """

    vector: PyTree
    result: Any
    failures: Int[Array, ""]


class Schedule(NamedTuple):
    """What is due at a step of the optimiser.

    `steps` is how many steps there were, and `was_rejected` whether the last step was rejected. After a rejected step
    everything is due.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    schedule = ng.Schedule(steps=jnp.array(20), was_rejected=jnp.array(False))
    assert schedule.is_due(10) and not schedule.is_due(7)
    ```
    """

    steps: Int[Array, ""]
    was_rejected: Bool[Array, ""]

    def is_due(self, every: int, start: int = 0) -> Bool[Array, ""]:
        """Whether something done every so many steps is to be done now. At the start it is done more often, after 1, 2,
        4 ... steps."""
        count = self.steps
        is_early = (count < every) & ((count & (count - 1)) == 0)
        return is_early | (count % every == start) | self.was_rejected


class AbstractStructure(eqx.Module):
    """Base class of structures: estimate the metric from batches, store it between steps, and solve with it.

    ```python
    import equinox as eqx
    import jax
    import jax.numpy as jnp
    import natgrad as ng


    class Identity(ng.AbstractStructure):
        # The identity in place of the metric: gradient descent.

        batch_fraction: float = eqx.field(default=1.0, static=True)

        def init(self, points, key, damping):
            return ()

        def update(self, state, points, key, schedule, is_good):
            return state

        def mean_eigenvalue(self, state, points, key):
            return jnp.ones(())

        def direction(self, state, points, covector, damping):
            return ng.Direction(covector, ng.STEP_RESULTS.successful, failures=jnp.array(0)), state


    step, damping = ng.ConstantStep(0.1), ng.NoDamping()
    opt = ng.NaturalGradient(lambda w, x: x @ w, ng.LeastSquares(), Identity(), damping, step=step)
    x = jnp.array([[1.0], [2.0]])
    w, batch = jnp.zeros((1, 1)), (x, 3 * x)
    w, state, info = jax.jit(opt.step)(w, opt.init(w, batch), batch)
    assert jnp.allclose(w, 0.75)  # a tenth of the gradient
    ```
    """

    # The fraction of every batch on which the metric is measured, other examples at every step.
    batch_fraction: eqx.AbstractVar[float]

    @property
    def has_sites(self) -> bool:
        """Whether statistics of single examples are needed."""
        return False

    @property
    def uses_masks(self) -> bool:
        """Whether masks of positions are used, as Kronecker factors do."""
        return False

    @property
    def is_damped(self) -> bool:
        """Whether the metric is damped, if nothing else is asked for."""
        return True

    @abstractmethod
    def init(self, points: Sequence[TermPoint], key: Key | None, damping: DampingMatrix) -> PyTree:
        """A state of the right shapes. Only these are used: a run starts from zeros."""

    @abstractmethod
    def update(
        self, state: PyTree, points: Sequence[TermPoint], key: Key | None, schedule: Schedule, is_good: Bool[Array, ""]
    ) -> PyTree:
        """The state updated by this batch; unchanged if `is_good` is false."""

    @abstractmethod
    def mean_eigenvalue(self, state: PyTree, points: Sequence[TermPoint], key: Key | None) -> Scalar:
        """The trace of the metric over the number of entries of parameters that it depends on."""

    def refresh(self, state: PyTree, damping: DampingMatrix, schedule: Schedule) -> PyTree:
        """The state with the inverse that this step is to use."""
        del damping, schedule
        return state

    @abstractmethod
    def direction(
        self, state: PyTree, points: Sequence[TermPoint], covector: PyTree, damping: DampingMatrix
    ) -> tuple[Direction, PyTree]:
        """The solution, and the state after it."""

    def diagonal(self, state: PyTree, points: Sequence[TermPoint]) -> PyTree:
        """The diagonal of the metric. Only needed by structures that accept damping relative to the diagonal."""
        raise NotImplementedError

    def inspect(self, state: PyTree) -> None:
        """Warn of what the shapes of a state reveal."""

    def report(self, state: PyTree) -> StructureReport:
        """The structure that every parameter got. Only of structures that treat parameters differently."""
        del state
        raise TypeError(f"`{type(self).__name__}` treats all parameters alike: there is nothing to report.")

    def check(self, damping: DampingMatrix) -> None:
        """Refuse damping that this structure has no use for."""


def over_live(trace: Scalar, diagonal: Array) -> Scalar:
    """A trace over the number of entries of the diagonal that are not zero. Rows of a look-up table that no example
    reads, or units that are never active, would otherwise make a mean as small as they are many."""
    return trace / jnp.maximum(jnp.sum(diagonal > 0), 1).astype(trace.dtype)


def where_due(due: Any, new: Callable[[], PyTree], old: PyTree) -> PyTree:
    """`new()` where due, else `old`; computed only where due."""
    return jax.lax.cond(due, new, lambda: old)


def check_batch_fraction(structure: Any) -> None:
    name = "`batch_fraction`, the fraction of every batch to measure the metric on,"
    check_number(structure.batch_fraction, name, above=0, most=1)


def check_periods(structure: Any) -> None:
    check_batch_fraction(structure)
    name = type(structure).__name__
    for period in ("refresh_every", "update_every", "num_samples"):
        value = getattr(structure, period, 1)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` needs `{period}` to be a whole number of at least 1, but got {value}.")
    check_number(structure.decay, "`decay`", above=0, most=1)
