"""The optimiser: a problem, a structure for its metric, damping, a step rule, momentum, a penalty and a guard, put
together."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from natgrad import _tree
from natgrad._block.structure_report import StructureReport
from natgrad._check import is_concrete, public
from natgrad._model import check_params
from natgrad._optimiser.compatible import check_mask_use, check_together, check_types, suitable_damping
from natgrad._optimiser.cost import Cost, CostPoint, Pass, TermPoint, term_on_batch
from natgrad._optimiser.damping import AbstractDamping, Reduction, without_zero
from natgrad._optimiser.flax import register_with_flax
from natgrad._optimiser.guard import AbstractGuard, Rollback, Soundness, Trial
from natgrad._optimiser.info import Info, Quantity
from natgrad._optimiser.method import compilable
from natgrad._optimiser.momentum import AbstractMomentum, Flat
from natgrad._optimiser.penalty import AbstractPenalty, damping_matrix
from natgrad._optimiser.phases import Measurement, NaturalStep, describe
from natgrad._optimiser.state import State
from natgrad._optimiser.step.base import AbstractStep, Expansion, Proposal, Search, dot
from natgrad._optimiser.step.quadratic_model import QuadraticModel
from natgrad._optimiser.structure.base import AbstractStructure, Schedule
from natgrad._optimiser.structure.kfac import KFAC
from natgrad._optimiser.term import Term, as_terms, aux_of, batches_of
from natgrad._optimiser.trainable import (
    as_choice,
    check_trained,
    is_floating,
    partition,
    refuse_numbers,
    warn_of_unused,
)
from natgrad._types import Key, Scalar


class NaturalGradient(eqx.Module):
    r"""An optimiser that follows the natural gradient $-(G + D)^{-1}g$ of a problem.

    Steps are pure functions: `jax.jit(opt.step)` is traced once, and works inside `jax.lax.scan`. By default nothing
    has to be tuned as long as batches are large: damping starts at the mean eigenvalue of the metric and follows how
    well steps are predicted, and their size and momentum minimise the quadratic model. For small batches, use
    `step=CrossValidated()`.

    The optimiser is immutable, and a tree whose leaves are its numbers (damping, learning rates, decays ...): pass it
    to a function compiled by `equinox.filter_jit`, and another number compiles nothing; sweep a number by
    `equinox.filter_vmap`.

    **Arguments:**

    - `model`: `model(params, x) -> z`; or a `Term` or `Terms`, which have objectives of their own.
    - `objective`: an exponential family, `LeastSquares()`, or `Objective(loss, geometry)`.
    - `structure`: of the metric: `KFAC()`, `EKFAC()`, `Diagonal()`, `Exact(solver)` or `InnerSolve(optimiser)`.
    - `damping`: `LevenbergMarquardt()`, `ConstantDamping(value)` or `NoDamping()`; by default what suits the step rule.
    - `step`: `QuadraticModel()`, `CrossValidated()`, `KLClip()`, `ConstantStep(learning_rate)`, `TrustRegion(radius)`,
      `GridLineSearch()` or `ArmijoLineSearch()`.
    - `momentum`: `NoMomentum()`, `HeavyBall(decay)` or `Spring(decay)`; by default what suits the step rule.
    - `guard`: `Rollback()`, which takes back steps that make the loss diverge, or `NoGuard()`.
    - `penalty`: on the size of parameters, `L2(value)` or `WeightDecay(value)`.
    - `trainable`: which parameters to train, by default all floating-point arrays: a path such as `"params['head']"`,
      several, a mapping from paths to `True` or `False`, a function of a leaf or of its path and the leaf, or a tree of
      `True` and `False` that is a prefix of the parameters.
    - `micro_batches`: in how many pieces to work through a batch, to save memory; the metric is measured on one.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng


    def model(params, x):
        return jnp.tanh(x @ params["w1"]) @ params["w2"]


    x = jnp.linspace(-1.0, 1.0, 8)[:, None]
    batch = x, jnp.sin(3 * x)
    params = {"w1": jnp.linspace(-1.0, 1.0, 4)[None], "w2": jnp.ones((4, 1))}
    opt = ng.NaturalGradient(model, ng.LeastSquares(), structure=ng.KFAC())
    state, step = opt.init(params, batch), jax.jit(opt.step)
    for _ in range(5):
        params, state, info = step(params, state, batch)
    assert info.loss < 0.1
    ```
    """

    term_names: tuple[str | None, ...] = eqx.field(static=True)
    term_list: tuple[Term, ...]
    structure: AbstractStructure
    damping: AbstractDamping
    rule: AbstractStep
    momentum: AbstractMomentum
    guard: AbstractGuard
    penalty: AbstractPenalty | None
    trainable: Any
    micro_batches: int = eqx.field(static=True)

    @public
    def __init__(
        self,
        model: Any,
        objective: Any = None,
        structure: Any = None,
        damping: Any = None,
        *,
        step: Any = None,
        momentum: Any = None,
        guard: Any = None,
        penalty: Any = None,
        trainable: Any = None,
        micro_batches: int = 1,
    ):
        terms = as_terms(model, objective)
        # Not as a mapping, which a tree would put in the order of its names.
        self.term_names, self.term_list = tuple(terms), tuple(terms.values())
        self.structure = KFAC() if structure is None else structure
        self.rule = QuadraticModel() if step is None else step
        self.guard = Rollback() if guard is None else guard
        check_types(
            structure=(self.structure, AbstractStructure, "a structure, such as `KFAC()` or `Exact()`"),
            step=(self.rule, AbstractStep, "a step rule, such as `QuadraticModel()` or `CrossValidated()`"),
            guard=(self.guard, AbstractGuard, "`Rollback()` or `NoGuard()`"),
        )
        damping = suitable_damping(self.structure, self.rule) if damping is None else damping
        self.momentum = self.rule.momentum if momentum is None else momentum
        check_types(
            damping=(damping, AbstractDamping, "`LevenbergMarquardt()` or `ConstantDamping(value)`"),
            momentum=(self.momentum, AbstractMomentum, "`NoMomentum()`, `HeavyBall()` or `Spring()`"),
            penalty=(penalty, AbstractPenalty | None, "`L2(value)` or `WeightDecay(value)`"),
        )
        self.damping, self.penalty = without_zero(damping), penalty
        self.trainable = as_choice(trainable)
        self.micro_batches = micro_batches
        check_together(self.damping, self.rule, self.momentum, penalty)
        if type(micro_batches) is not int or micro_batches < 1:
            raise ValueError(f"`micro_batches` needs a whole number of at least 1, but got {micro_batches}.")

    @property
    def terms(self) -> dict[str | None, Term]:
        return dict(zip(self.term_names, self.term_list, strict=True))

    @compilable
    @public
    def init(self, params: PyTree, batch: Any) -> State:
        """The state before the first step. `batch` may be shapes (`jax.ShapeDtypeStruct`), and so may `params`."""
        trained, fixed = self._partition(params)
        check_trained(params, trained, self.trainable)
        check_params(trained)
        refuse_numbers(params)
        arrays, others = eqx.partition(fixed, lambda leaf: hasattr(leaf, "dtype"))

        def initial(trained, arrays, batch):
            return self._initial(trained, eqx.combine(arrays, others), batch)

        shapes = jax.eval_shape(initial, _tree.structure(trained), arrays, batch)
        if not any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves((params, batch))):
            self._check_data(trained, fixed, batch)
        self.structure.inspect(shapes.structure)
        # By NumPy, because `jnp.zeros` compiles a program for each shape (JAX 0.10.1). Reproduced by
        # `test_every_shape_outside_jit_is_compiled`.
        state = jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype)), shapes)
        register_with_flax()
        return state

    @compilable
    @public
    def step(self, params: PyTree, state: State, batch: Any, key: Key | None = None) -> tuple[PyTree, State, Info]:
        """New parameters, the new state, and what happened.

        `batch` is `(x, y)`, `(x, y, weights)` or a `Batch`; for `Terms`, a mapping from the name of each term to its
        batch. With a `key` cotangents are drawn where the structure needs some; without, backward passes are exact."""
        trained, fixed = self._partition(params)
        self._cost(fixed, batch).refuse_invalid(trained)
        _, after, state, info = self._advance(trained, fixed, None, state, batch, key)
        return eqx.combine(_tree.flatten(trained)[1](after), fixed), state, info

    @compilable
    @public
    def update(
        self, gradient: PyTree, state: State, params: PyTree, batch: Any, key: Key | None = None
    ) -> tuple[PyTree, State, Info]:
        """Like `step`, with a gradient from elsewhere (before `L2` adds to it) in place of the gradient of the cost.

        Returns what to add to the parameters instead of new parameters; zero for parameters that are not trained."""
        trained, fixed = self._partition(params)
        self._cost(fixed, batch).refuse_invalid(trained)
        trained_gradient, others = eqx.partition(
            gradient, jax.tree.map(lambda leaf: leaf is not None, trained, is_leaf=_is_none)
        )
        before, after, state, info = self._advance(trained, fixed, trained_gradient, state, batch, key)
        # Later transformations of optax may change the update, so an earlier step cannot be undone here.
        change = jnp.where(info.accepted, after - before, 0.0)
        others = jax.tree.map(lambda leaf: jnp.zeros_like(leaf) if is_floating(leaf) else leaf, others)
        return eqx.combine(_tree.flatten(trained)[1](change), others), state, info

    def report(self, state: State) -> StructureReport:
        """The structure that every parameter got, for `KFAC` and `EKFAC`."""
        return self.structure.report(state.structure)

    def _advance(
        self, params: PyTree, fixed: PyTree, external_gradient: PyTree | None, state: State, batch: Any, key: Key | None
    ) -> tuple[Flat, Flat, State, Info]:
        """The parameters before and after the step, as vectors, the new state, and what happened."""
        measurement = self._measure(params, self._cost(fixed, batch), external_gradient, state)
        solved = self._solve(measurement, state, key)
        expansion = measurement.expansion._replace(damping=solved.entries)
        search = Search(solved.natural, state.last, self.momentum.coefficient(state.steps), state.rule)
        shrinkage = None if self.penalty is None else self.penalty.shrinkage(params, state.steps)
        proposal = self._propose(expansion, search, shrinkage)
        proposal, is_diverging = self._judge(expansion, proposal, state, measurement.is_suspicious)
        after, state, info = self._conclude(measurement, solved, proposal, is_diverging, state)
        return expansion.w, after, state, info._replace(aux=aux_of(self.terms, eqx.combine(params, fixed), batch))

    def _measure(self, params: PyTree, cost: Cost, external_gradient: PyTree | None, state: State) -> Measurement:
        """One forward and one backward pass: the cost around the parameters, and whether the batch can be used."""
        point = self._cost_point(cost, params, state.steps)
        loss, gradient = point.value_and_gradient()
        # Everything from here on is done with vectors: one operation instead of one for every parameter.
        w, unflatten = _tree.flatten(params)
        g = (gradient if external_gradient is None else _tree.flatten(external_gradient)[0]).astype(w.dtype)
        matrix = damping_matrix(self.damping, None, self.penalty, params)
        penalties = jnp.asarray(matrix.penalties(), w.dtype)
        penalty = lambda w: (dot(w, penalties * w) / 2).astype(loss.dtype)
        loss_of = lambda w: cost(unflatten(w))
        has_l2 = not matrix.l2.is_default
        if has_l2:
            loss, g = loss + penalty(w), g + penalties * w
        expansion = Expansion(
            w=w,
            loss=loss,
            gradient=g,
            steps=state.steps,
            damping=None,
            penalties=penalties,
            loss_at=(lambda w: loss_of(w) + penalty(w)) if has_l2 else loss_of,
            inner_products=lambda vectors: point.inner_products(vectors, unflatten),
            divergence=lambda w: point.divergence(unflatten(w)),
        )
        is_finite = jnp.isfinite(loss) & jnp.isfinite(dot(g, g))
        soundness = Soundness(is_finite, point.is_valid() & point.has_weight(), point.is_coupled())
        is_suspicious = self.guard.is_suspicious(state.guard, loss) & ~state.was_rejected & soundness.is_usable
        return Measurement(point, expansion, matrix, unflatten, soundness, is_suspicious)

    def _solve(self, measurement: Measurement, state: State, key: Key | None) -> NaturalStep:
        """The natural gradient in the damped metric, after the structure has seen the batch."""
        points, expansion = measurement.cost_point.points, measurement.expansion
        is_good = measurement.soundness.is_sound & ~measurement.is_suspicious
        schedule = Schedule(state.steps, state.was_rejected)
        structure = self.structure.update(state.structure, points, key, schedule, is_good)
        damping, is_known = self._started(state, structure, points, key, is_good)
        matrix = measurement.matrix._replace(strength=self.damping.strength(damping, state.steps))
        self.structure.check(matrix)
        structure = self.structure.refresh(structure, matrix, schedule)
        diagonal = _tree.flatten(self.structure.diagonal(structure, points))[0] if matrix.is_relative else None
        entries = jnp.asarray(matrix.entries(diagonal), expansion.w.dtype)
        covector = self.momentum.covector(expansion.gradient, state.last, entries)
        direction, structure = self.structure.direction(structure, points, measurement.unflatten(covector), matrix)
        natural = -_tree.flatten(direction.vector)[0].astype(expansion.w.dtype)
        return NaturalStep(direction, natural, entries, matrix.strength, structure, damping, is_known)

    def _propose(self, expansion: Expansion, search: Search, shrinkage: Array | None) -> Proposal:
        """The step that the rule would take, with the decrease that damping has to know."""
        proposal = self.rule.propose(expansion, search)
        if shrinkage is not None:
            rate = jnp.asarray(proposal.step_size, expansion.w.dtype)
            proposal = proposal._replace(beside=-rate * shrinkage.astype(rate.dtype) * expansion.w)
        if self.damping.is_adaptive and proposal.predicted_decrease is None:
            model, one = expansion.quadratic(proposal.update + proposal.beside), jnp.ones(1, expansion.loss.dtype)
            proposal = proposal._replace(
                predicted_decrease=model.decrease(one), predicted_divergence=model.divergence(one)
            )
        return proposal

    def _judge(
        self, expansion: Expansion, proposal: Proposal, state: State, is_suspicious: Array
    ) -> tuple[Proposal, Bool[Array, ""]]:
        """The step with the loss after it, if damping wants that and the rule has not found it; and whether the last
        step made the loss diverge: a suspicious loss is compared with the loss of the same batch before that step."""
        wants_after = self.damping.is_adaptive and proposal.loss_after is None
        is_wanted = wants_after & jnp.asarray(self.damping.wants_loss_after(expansion.steps))
        before = self.guard.before(state.guard)
        after = expansion.w + proposal.update + proposal.beside
        zero = jnp.zeros((), expansion.loss.dtype)

        def loss_if(is_due: Array, w: Flat) -> Scalar:
            return jax.lax.cond(is_due, lambda: expansion.loss_at(w).astype(zero.dtype), lambda: zero)

        if wants_after:
            rounding = self.guard.rounding(state.guard, expansion.loss)
            loss_after = loss_if(is_wanted, after)
            is_accepted = ~is_wanted | (loss_after <= expansion.loss + rounding)
            known = Quantity.of(loss_after, expansion.loss.dtype, is_wanted)
            proposal = proposal._replace(loss_after=known, is_accepted=is_accepted)
        loss_before = zero if before is None else loss_if(is_suspicious, before)
        return proposal, is_suspicious & self.guard.is_diverging(state.guard, expansion.loss, loss_before)

    def _conclude(
        self,
        measurement: Measurement,
        solved: NaturalStep,
        proposal: Proposal,
        is_diverging: Bool[Array, ""],
        state: State,
    ) -> tuple[Flat, State, Info]:
        """The parameters after the step, the new state, and what happened."""
        expansion, usable = measurement.expansion, measurement.soundness.is_usable
        soundness = measurement.soundness._replace(is_finite=measurement.soundness.is_finite & ~is_diverging)
        trial = Trial(expansion, proposal, state.last, soundness, state.was_rejected)
        conclusion = self.guard.conclude(state.guard, trial)
        info = describe(solved, trial, conclusion)
        accepted = conclusion.is_accepted
        rounding = self.guard.rounding(state.guard, expansion.loss)
        damping = self.damping.update(solved.damping, Reduction.of(info, state.steps, rounding))
        is_told = solved.is_known & usable
        new = State(
            steps=state.steps + 1,
            structure=solved.structure,
            damping=_tree.where(is_told, damping, state.damping),
            rule=_tree.where(
                accepted, proposal.memory, _tree.where(usable, self.rule.rejected(state.rule), state.rule)
            ),
            guard=conclusion.state,
            last=conclusion.last,
            was_rejected=~accepted,
        )
        return conclusion.w, new, info

    def _started(
        self, state: State, structure: PyTree, points: Sequence[TermPoint], key: Key | None, is_sound: Array
    ) -> tuple[PyTree, Bool[Array, ""] | bool]:
        """The state of the damping, which may start from the mean eigenvalue of the metric, and whether to store it.

        If the mean eigenvalue is zero or not finite, 1 is used for this step, and not stored."""
        if not self.damping.needs_mean:
            return state.damping, True
        is_relative = self.damping.shape == "diagonal"
        is_started = jnp.asarray(self.damping.strength(state.damping, state.steps)) > 0

        def start() -> tuple[PyTree, Array]:
            mean = 1.0 if is_relative else self.structure.mean_eigenvalue(structure, points, key)
            mean = jnp.asarray(mean, float)
            is_known = jnp.isfinite(mean) & (mean > 0)
            return self.damping.start(state.damping, jnp.where(is_known, mean, 1.0)), is_known

        return jax.lax.cond(is_sound & ~is_started, start, lambda: (state.damping, is_started))

    def _initial(self, trained: PyTree, fixed: PyTree, batch: Any) -> State:
        point = self._cost_point(self._cost(fixed, batch), trained, jnp.array(0))
        damping = self.damping.init()
        strength = self.damping.strength(damping, jnp.array(0))
        matrix = damping_matrix(self.damping, strength, self.penalty, trained)
        self.structure.check(matrix)
        structure = self.structure.init(point.points, jax.random.key(0), matrix)
        w = _tree.flatten(trained)[0]
        last = w if self.momentum.uses_last else None
        steps, was_rejected = jnp.array(0), jnp.array(False)
        rule, guard = self.rule.init(w), self.guard.init(w, last)
        return State(steps, structure, damping, rule, guard, last, was_rejected)

    def _cost_point(self, cost: Cost, params: PyTree, turn: Array) -> CostPoint:
        fraction = min(self.structure.batch_fraction, 1 / self.micro_batches)
        return cost.at(params, Pass(fraction, turn, self.structure.has_sites))

    def _partition(self, params: PyTree) -> tuple[PyTree, PyTree]:
        return partition(params, self.trainable)

    def _cost(self, fixed: PyTree, batch: Any) -> Cost:
        def of_trained(model):
            return lambda trained, *x: model(eqx.combine(trained, fixed), *x)

        pairs = list(batches_of(self.terms, batch))
        for _, examples in pairs:
            check_mask_use(examples, self.structure)
        terms = [term_on_batch(term, examples, of_trained(term.outputs)) for term, examples in pairs]
        return Cost(terms, self.micro_batches)

    def _check_data(self, trained: PyTree, fixed: PyTree, batch: Any) -> None:
        """Refuse concrete targets that cannot be, and models that couple examples; and warn of unused parameters."""
        cost = self._cost(fixed, batch)
        cost.refuse_invalid(trained)
        if self.structure.has_sites and is_concrete((trained, fixed, batch)):
            warn_of_unused(sorted(cost.unused_params(trained)))


def _is_none(leaf: Any) -> bool:
    return leaf is None
