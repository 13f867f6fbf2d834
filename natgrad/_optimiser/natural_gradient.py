"""The optimiser: a problem, a structure for its metric, damping, a step rule and momentum, put together."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree

from natgrad import _tree
from natgrad._blocks.paths import check_paths, option_for
from natgrad._model import check_params, finite
from natgrad._optimiser.compatible import check_together, check_types
from natgrad._optimiser.damping.base import AbstractDamping, Added, Outcome
from natgrad._optimiser.damping.levenberg_marquardt import LevenbergMarquardt
from natgrad._optimiser.evaluation import Evaluation, evaluate, loss_at
from natgrad._optimiser.info import STEP_RESULTS, Info
from natgrad._optimiser.momentum import AbstractMomentum
from natgrad._optimiser.problem import Bound, as_terms, batches_of
from natgrad._optimiser.step.base import AbstractStep, Context, Proposal
from natgrad._optimiser.step.quadratic_model import QuadraticModel
from natgrad._optimiser.structure.base import AbstractStructure, Direction, Moment
from natgrad._optimiser.structure.kfac import KFAC
from natgrad._per_example.forward import check_model
from natgrad._types import Key, Scalar


class State(NamedTuple):
    """What an optimiser remembers: a tree of arrays, to be passed from step to step."""

    count: Int[Array, ""]
    structure: PyTree
    damping: PyTree
    last: PyTree
    # The parameters and the update before the last step, to go back to.
    before: tuple[PyTree, PyTree]
    rejections: Int[Array, ""]


class NaturalGradient:
    r"""An optimiser that follows the natural gradient $-(G + D)^{-1}g$ of a problem.

    Steps are pure functions: `jax.jit(opt.step)` is traced once, and works inside `jax.lax.scan`. By default nothing has
    to be tuned as long as batches are large: damping starts at the mean eigenvalue of the metric and follows how well
    steps are predicted, and their size and momentum minimise the quadratic model. For small batches, use
    `step=KLClip()`.

    **Arguments:**

    - `model`: `model(params, x) -> z`; or `Terms`, which have objectives of their own.
    - `objective`: an exponential family, `LeastSquares()`, or `Objective(loss, geometry)`.
    - `structure`: of the metric: `KFAC()`, `EKFAC()`, `Diagonal()` or `Exact(solver)`.
    - `damping`: `LevenbergMarquardt()` or `ConstantDamping(value)`.
    - `step`: `QuadraticModel()`, `KLClip()`, `ConstantStep(rate)`, `TrustRegion(radius)`, `GridLineSearch()` or
      `ArmijoLineSearch()`.
    - `momentum`: `NoMomentum()`, `HeavyBall(decay)` or `Spring(decay)`; by default what suits the step rule.
    - `l2`: adds $\frac{l}{2}|w|^2$ to the loss, and so to gradient, metric and model; a number, or a mapping from paths
      to numbers for the parameters at or below them.
    - `weight_decay`: shrinks the parameters by this part of the learning rate, beside the step and not in the metric.
    - `trainable`: which leaves of the parameters to train, as for `equinox.partition`; by default all floating-point
      arrays.
    - `has_aux`: whether the model returns `(z, aux)`; `aux` is then in `info`.
    - `micro_batches`: in how many pieces to work through a batch, to save memory; the metric is measured on one.
    - `max_rejections`: how many steps in a row may be rejected before `info.result` says that the run has failed.
    - `check`: whether `init` tests, on concrete data, that the model treats examples independently.
    """

    def __init__(
        self,
        model: Any,
        objective: Any = None,
        structure: AbstractStructure | None = None,
        damping: AbstractDamping | None = None,
        step: AbstractStep | None = None,
        momentum: AbstractMomentum | None = None,
        *,
        l2: float | Mapping[str, float] = 0.0,
        weight_decay: float = 0.0,
        trainable: Any = eqx.is_inexact_array,
        has_aux: bool = False,
        micro_batches: int = 1,
        max_rejections: int = 10,
        check: bool = True,
    ):
        self.terms = as_terms(model, objective)
        self.structure = KFAC() if structure is None else structure
        self.damping = LevenbergMarquardt() if damping is None else damping
        self.rule = QuadraticModel() if step is None else step
        check_types(
            structure=(self.structure, AbstractStructure, "`KFAC()`, `EKFAC()`, `Diagonal()` or `Exact()`"),
            damping=(self.damping, AbstractDamping, "`LevenbergMarquardt()` or `ConstantDamping(value)`"),
            step=(self.rule, AbstractStep, "a step rule, such as `QuadraticModel()` or `KLClip()`"),
        )
        self.momentum = self.rule.momentum if momentum is None else momentum
        check_types(momentum=(self.momentum, AbstractMomentum, "`NoMomentum()`, `HeavyBall()` or `Spring()`"))
        self.l2 = dict(l2) if isinstance(l2, Mapping) else {"": l2}
        self.weight_decay, self.trainable, self.has_aux = weight_decay, trainable, has_aux
        self.micro_batches, self.max_rejections, self.check = micro_batches, max_rejections, check
        check_together(
            self.structure,
            self.damping,
            self.rule,
            self.momentum,
            has_l2=any(self.l2.values()),
            weight_decay=weight_decay,
            micro_batches=micro_batches,
        )

    # The two functions -----------------------------------------------------------------------------------

    def init(self, params: PyTree, batch: Any) -> State:
        """The state before the first step. `batch` may be shapes (`jax.ShapeDtypeStruct`), and so may `params`."""
        trained, fixed = self._partition(params)
        check_params(trained, "`NaturalGradient.init`")
        if self.check:
            for bound in self._bind(fixed, batch):
                check_model(bound.model, trained, bound.batch.x, 0, "`NaturalGradient.init`")
        shapes = jax.eval_shape(self._initial, _tree.structure(trained), fixed, batch)
        self.structure.inspect(shapes.structure)
        return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def step(self, params: PyTree, state: State, batch: Any, key: Key | None = None) -> tuple[PyTree, State, Info]:
        """New parameters, the new state, and what happened.

        `batch` is `(x, y)` or `(x, y, weights)`, of `Terms` a mapping to these. With a `key` cotangents are drawn where
        the structure needs some; without, backward passes are exact."""
        trained, fixed = self._partition(params)
        problem = self._bind(fixed, batch)
        evaluation = self._evaluate(problem, trained, state.count)
        trained, state, info = self._advance(problem, trained, state, evaluation, evaluation.gradient, key)
        aux = self._aux(params, batch) if self.has_aux else None
        return eqx.combine(trained, fixed), state, info._replace(aux=aux)

    # Their parts -----------------------------------------------------------------------------------------

    def _advance(
        self, problem: list[Bound], params: PyTree, state: State, evaluation: Evaluation, gradient: PyTree, key: Any
    ) -> tuple[PyTree, State, Info]:
        names = _names(params)
        l2 = self._l2(names)
        penalised = lambda params: loss_at(problem, params, self.micro_batches) + _penalty(l2, params)
        loss = evaluation.loss + _penalty(l2, params)
        gradient = jax.tree.map(lambda g, w, l: g + l * w, gradient, params, _like(l2, params)) if any(l2) else gradient
        is_finite = jnp.isfinite(loss) & finite(gradient).holds
        moment = Moment(state.count, state.rejections > 0)

        solver = self.structure.update(state.structure, evaluation.parts, key, moment, is_finite)
        strengths = self._started(state, solver, evaluation, key)
        strength = self.damping.strength(strengths, state.count)
        added = self.damping.added(strength, l2, names)
        self.structure.check(added)
        solver = self.structure.refresh(solver, added, moment)
        diagonal = self.structure.diagonal(solver, evaluation.parts) if added.is_relative else None
        covector = self.momentum.covector(gradient, state.last, added, diagonal)
        found, solver = self.structure.direction(solver, evaluation.parts, covector, added)

        momentum = self.momentum.coefficient(state.count)
        direction = jax.tree.map(jnp.negative, found.vector)
        context = Context(
            params, loss, gradient, direction, state.last, momentum, state.count, evaluation, added, diagonal, penalised
        )
        proposal = self._proposed(context)
        return self._concluded(context, proposal, found, solver, strengths, state, is_finite)

    def _proposed(self, context: Context) -> Proposal:
        """The step that the rule would take, with what damping has to know about it."""
        proposal = self.rule.propose(context)
        if self.weight_decay:
            shrunk = _tree.combine([1.0, -self.weight_decay * proposal.step_size], [proposal.update, context.params])
            proposal = proposal._replace(update=shrunk)
        if not self.damping.is_adaptive:
            return proposal
        if proposal.predicted_decrease is None:
            model, one = context.quadratic([proposal.update]), jnp.ones(1, context.loss.dtype)
            proposal = proposal._replace(
                predicted_decrease=model.decrease(one), predicted_divergence=model.divergence(one)
            )
        if proposal.loss_after is None:
            wanted = self.damping.wants_loss_after(context.count)
            unknown = jnp.full((), jnp.nan, context.loss.dtype)
            after = lambda: context.loss_at(context.moved(proposal.update)).astype(unknown.dtype)
            loss_after = jax.lax.cond(wanted, after, lambda: unknown)
            is_accepted = jnp.where(wanted, _is_no_worse(loss_after, context.loss), True)
            proposal = proposal._replace(loss_after=loss_after, is_accepted=is_accepted)
        return proposal

    def _concluded(
        self,
        context: Context,
        proposal: Proposal,
        found: Direction,
        solver: PyTree,
        strengths: PyTree,
        state: State,
        is_finite: Bool[Array, ""],
    ) -> tuple[PyTree, State, Info]:
        """Take the step, or stay, or go back."""
        is_accepted = is_finite & proposal.is_accepted & finite(proposal.update).holds
        rejections = jnp.where(is_accepted, 0, state.rejections + 1)
        params, last = context.params, state.last
        can_go_back = ~is_finite & (state.count > 0)
        choose = lambda new, old, before: jnp.where(is_accepted, new, jnp.where(can_go_back, before, old))
        new_params = jax.tree.map(choose, context.moved(proposal.update), params, state.before[0])
        new_last = jax.tree.map(choose, proposal.update, last, state.before[1])
        before = jax.tree.map(choose, (params, last), state.before, state.before)

        number = lambda value: jnp.asarray(jnp.nan if value is None else value, context.loss.dtype)
        loss_after, predicted = number(proposal.loss_after), number(proposal.predicted_decrease)
        outcome = Outcome(state.count, context.loss, loss_after, predicted, ~is_accepted)
        rejected = STEP_RESULTS.where(is_finite, STEP_RESULTS.rejected, STEP_RESULTS.restored)
        rejected = STEP_RESULTS.where(rejections > self.max_rejections, STEP_RESULTS.too_many_rejections, rejected)
        info = Info(
            loss=context.loss,
            loss_after=loss_after,
            damping=number(context.added.strength),
            step_size=number(proposal.step_size),
            momentum=number(proposal.momentum),
            predicted_decrease=predicted,
            actual_decrease=context.loss - loss_after,
            divergence=number(proposal.divergence),
            predicted_divergence=number(proposal.predicted_divergence),
            cosine=number(proposal.cosine),
            accepted=is_accepted,
            result=STEP_RESULTS.where(is_accepted, found.result, rejected),
            failures=found.failures,
            aux=None,
        )
        damping = self.damping.update(strengths, outcome)
        return new_params, State(state.count + 1, solver, damping, new_last, before, rejections), info

    def _started(self, state: State, solver: PyTree, evaluation: Evaluation, key: Key | None) -> PyTree:
        """The state of the damping, which at the first step may depend on the metric."""
        if not self.damping.needs_mean:
            return state.damping
        start = lambda: self.damping.start(
            state.damping, self.structure.mean_eigenvalue(solver, evaluation.parts, key).astype(float)
        )
        return jax.lax.cond(state.count == 0, start, lambda: state.damping)

    def _initial(self, trained: PyTree, fixed: PyTree, batch: Any) -> State:
        evaluation = self._evaluate(self._bind(fixed, batch), trained, jnp.array(0))
        names = _names(trained)
        damping = self.damping.init()
        added = self.damping.added(self.damping.strength(damping, jnp.array(0)), self._l2(names), names)
        self.structure.check(added)
        structure = self.structure.init(evaluation.parts, jax.random.key(0), added)
        return State(jnp.array(0), structure, damping, trained, (trained, trained), jnp.array(0))

    def _evaluate(self, problem: list[Bound], params: PyTree, turn: Array) -> Evaluation:
        fraction = min(self.structure.part, 1 / self.micro_batches)
        return evaluate(problem, params, fraction, turn, self.structure.has_sites, self.micro_batches > 1)

    def _partition(self, params: PyTree) -> tuple[PyTree, PyTree]:
        return eqx.partition(params, self.trainable)

    def _bind(self, fixed: PyTree, batch: Any) -> list[Bound]:
        def of_trained(model):
            def outputs(trained, *x):
                found = model(eqx.combine(trained, fixed), *x)
                return found[0] if self.has_aux else found

            return outputs

        return [Bound(term, of_trained(term.model), own) for term, own in batches_of(self.terms, batch)]

    def _aux(self, params: PyTree, batch: Any) -> PyTree:
        """What the model returns besides its outputs, on the whole batch."""
        call = lambda term, own: term.model(params, *([] if own.x is None else [own.x]))[1]
        found = {name: call(*pair) for name, pair in zip(self.terms, batches_of(self.terms, batch), strict=True)}
        return found[None] if None in found else found

    def _l2(self, names: tuple[str, ...]) -> tuple[float, ...]:
        check_paths(self.l2, names, "`NaturalGradient`: `l2`")
        each = [option_for(self.l2, name) for name in names]
        return tuple(0.0 if own is None else float(own) for own in each)


def _names(params: PyTree) -> tuple[str, ...]:
    return tuple("params" + jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(params))


def _like(each: tuple[float, ...], params: PyTree) -> PyTree:
    return jax.tree.unflatten(jax.tree.structure(params), [jnp.asarray(l, w.dtype) for l, w in zip(each, jax.tree.leaves(params), strict=True)])


def _penalty(l2: tuple[float, ...], params: PyTree) -> Scalar | float:
    parts = [l / 2 * _tree.vdot(w, w) for l, w in zip(l2, jax.tree.leaves(params), strict=True) if l]
    return _tree.sum_leaves(parts) if parts else 0.0


def _is_no_worse(loss_after: Scalar, loss: Scalar) -> Bool[Array, ""]:
    """Whether a loss has not risen by more than rounding."""
    return loss_after <= loss + 10 * jnp.finfo(loss.dtype).eps * jnp.abs(loss)
