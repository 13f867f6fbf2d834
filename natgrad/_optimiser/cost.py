"""The cost of a step: terms on their batches, as a function of the parameters and after a forward pass.

One forward pass serves the loss, its gradient, products with the metric and its statistics."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from natgrad import _tree
from natgrad._check import are_met, caller, is_concrete, show
from natgrad._geometry.base import AbstractGeometry
from natgrad._optimiser.objective import AbstractObjective
from natgrad._optimiser.term import Term
from natgrad._point.batch import (
    Batch,
    at_most_one,
    check_weights,
    inverse_or_zero,
    largest_of_examples,
    spread,
    with_counted,
)
from natgrad._point.point import OutputMap, Point
from natgrad._point.probe import probe
from natgrad._program.trace import trace_example
from natgrad._types import Key, Output, Scalar
from natgrad._uses.parameter_uses import uses_of


def term_on_batch(term: Term, batch: Batch, model: Callable | None = None) -> "BatchTerm":
    """A term on its batch; `model` replaces the model of the term where only some parameters are trained."""
    return BatchTerm(term, OutputMap(term.outputs if model is None else model, batch, term.objective.geometry))


class BatchTerm(NamedTuple):
    """A term of the cost on its batch, as a function of the trained parameters."""

    term: Term
    map: OutputMap

    @property
    def batch(self) -> Batch:
        return self.map.batch

    def on(self, batch: Batch) -> "BatchTerm":
        """The term on another batch."""
        return self._replace(map=OutputMap(self.map.model, batch, self.map.geometry))

    def losses(self, z: Output) -> Float[Array, " N"]:
        """The loss of every example."""
        return self.weighed_sums(self.term.objective.loss, z, self.batch.y)

    def loss(self, params: PyTree) -> Scalar:
        return self.mean_loss(self.map(params))

    def mean_loss(self, z: Output) -> Scalar:
        return self.batch.mean(self.losses(z))

    def weighed_sums(self, function: Callable, z: Output, other: PyTree) -> Float[Array, " N"]:
        """A function of an output and something else for every example: where positions have weights, summed over
        them, relative to the weight of the example. What has no weight is left out, whatever it is."""
        weights = self.batch.weights
        if weights is None:
            return _numbers(jax.vmap(function)(z, other), 1)
        check_weights(weights, z, self.batch.y)
        is_counted = weights > 0
        z, other = with_counted(weights, (z, other))
        for _ in range(weights.ndim):
            function = jax.vmap(function)
        values = _numbers(function(z, other), weights.ndim)
        weights = at_most_one(weights.astype(values.dtype))
        share = weights * spread(inverse_or_zero(largest_of_examples(weights)), weights)
        return jnp.sum(jnp.where(is_counted, share * values, 0.0).reshape(len(values), -1), axis=1)

    def are_valid(self, z: Output) -> Bool[Array, "N ..."]:
        """Whether the target of every example, or of every position, is one that the objective can have."""
        weights, met = self.batch.weights, self._is_valid
        if weights is not None:
            check_weights(weights, z, self.batch.y)
        for _ in range(1 if weights is None else weights.ndim):
            met = jax.vmap(met)
        valid = met(z, self.batch.y)
        return valid if weights is None else (valid & jnp.isfinite(weights) & (weights >= 0)) | (weights == 0)

    def _is_valid(self, z: Output, y: PyTree) -> Bool[Array, ""]:
        requirements = self.term.objective.requirements(z, y)
        return are_met(requirements) if requirements else jnp.array(True)

    def refuse_invalid(self, z: Output, label: str | None = None) -> None:
        """Raise an error for the first invalid concrete target or weight, with its index and value. Only the shapes of
        `z` are used."""
        if not is_concrete((self.batch.y, self.batch.weights)):
            return
        like = _tree.zeros(z)
        with jax.ensure_compile_time_eval():
            wrong = np.argwhere(~np.asarray(self.are_valid(like)))
        if not len(wrong):
            return
        place = tuple(int(k) for k in wrong[0])

        def at(tree):
            return jax.tree.map(lambda leaf: np.asarray(leaf)[place], tree)

        requirements = self.term.objective.requirements(at(like), at(self.batch.y))
        unmet = next((need for need in requirements if not bool(jnp.all(need.holds))), None)
        where = f"example {place[0]}" + (f", position {', '.join(map(str, place[1:]))}" if place[1:] else "")
        if unmet is None:
            raise ValueError(
                f"{label or caller()}: the weight of {where} is {show(at(self.batch.weights))}. Weights must be "
                "finite and not negative: a weight of zero leaves an example or a position out."
            )
        raise ValueError(
            f"{label or caller()}: the target of {where} is {show(at(self.batch.y))}, but "
            f"`{_name(self.term.objective)}` needs {unmet.needs}. {unmet.remedy} To leave it out, give it a "
            "weight of zero: `(x, y, weights)`"
            + (", or use `Likelihood(family, ignore_label=...)`." if _has_labels(self.term.objective) else ".")
        )


class TermPoint(NamedTuple):
    """A term on a fraction of its batch, after the forward pass.

    `gives_batch_loss` says whether loss and gradient of the whole batch can be taken from this forward pass: not for a
    fraction of the batch, nor for a model that may couple examples."""

    batch_term: BatchTerm
    point: Point
    gives_batch_loss: bool

    @property
    def z(self) -> Output:
        return self.point.z

    @property
    def weight(self):
        """The weight of the term: a fraction of the batch stands for all of it."""
        return self.batch_term.term.weight

    @property
    def geometry(self) -> AbstractGeometry:
        return self.batch_term.term.objective.geometry

    def loss_and_gradient(self) -> tuple[Scalar, PyTree]:
        loss, cotangents = jax.value_and_grad(self.batch_term.mean_loss)(self.z)
        return loss, self.point.pull(cotangents)

    def columns(self, key: Key | None, num_samples: int, number: int) -> Output:
        """Columns whose products with themselves sum to the metric of every output, times the weight of the term.

        Exact, or drawn with a key; terms draw with keys of their own, by their `number`."""
        columns = self.point.columns(None if key is None else jax.random.fold_in(key, number), num_samples)
        # The metric is quadratic in columns, so that its weight becomes a root.
        return _tree.scale(jnp.sqrt(jnp.asarray(self.weight, float)), columns)

    def inner_products(self, vectors: Sequence[Array], unflatten: Callable[[Array], PyTree]) -> Float[Array, "k k"]:
        r"""$v_a^\top G v_b$ for the exact metric at this point."""
        tangents = jax.tree.map(lambda *z: jnp.stack(z), *(self.point.push(unflatten(v)) for v in vectors))
        covectors = jax.vmap(self.point.metric_mv)(tangents)

        def product(u: Output, v: Output) -> Scalar:
            return jnp.mean(jax.vmap(_tree.vdot)(u, v))

        return jax.vmap(lambda u: jax.vmap(lambda v: product(u, v))(covectors))(tangents)

    def divergence(self, params: PyTree) -> Scalar:
        """How far the outputs are from the outputs at other parameters, in the geometry."""
        z = self.point.map(params)
        return self.batch_term.batch.mean(self.batch_term.weighed_sums(self.geometry.dissimilarity, z, self.z))


class Pass(NamedTuple):
    """How a model is run: on which fraction of every batch, at which turn, and whether statistics of single examples
    are needed."""

    fraction: float
    turn: Array
    has_sites: bool


class Cost(NamedTuple):
    """The terms of a problem on their batches, a function of the parameters.

    Batches are worked through in `num_pieces`, one after the other."""

    terms: Sequence[BatchTerm]
    num_pieces: int = 1

    def __call__(self, params: PyTree) -> Scalar:
        """The cost over whole batches."""

        def loss(term: BatchTerm) -> Scalar:
            return term.loss(params)

        return _tree.sum_leaves([term.term.weight * _in_pieces(loss, term, self.num_pieces) for term in self.terms])

    def at(self, params: PyTree, how: Pass) -> "CostPoint":
        """Run the models on a fraction of every batch, another one at every turn."""
        return CostPoint(self, params, [_term_point(term, params, how) for term in self.terms])

    def refuse_invalid(self, params: PyTree, label: str | None = None) -> None:
        """Raise an error for invalid concrete targets or weights, and for batches whose weights are all zero."""
        # A compiled step looks at its batch itself, and the model is not traced once more for this.
        if not is_concrete([term.batch for term in self.terms]):
            return
        for term in self.terms:
            term.refuse_invalid(jax.eval_shape(term.map, params), label)
        # Only here: without concrete weights, a compiled step reports `invalid_batch` instead.
        counts = self.has_weight()
        if is_concrete(counts) and not counts:
            raise ValueError(
                f"{label or caller()}: the weights of the batch are all zero, so there is nothing to learn from. "
                "Skip this batch."
            )

    def unused_params(self, params: PyTree) -> set[str]:
        """The paths of the parameters that no model uses; refuses models that couple examples, where a term asks for
        it."""
        unused = []
        for term in self.terms:
            few = every_so_many(term.batch, 1 / self.num_pieces, jnp.array(0))
            program = trace_example(term.map.model, params, few.x, 0)
            unused.append({name for leaf, name in enumerate(program.names) if not uses_of(program.sites, leaf)})
            if program.is_concrete and term.term.check:
                # Some logits may be minus infinity on purpose.
                probe(term.map.model, program, params, few.x, needs_finite=False)
        return set.intersection(*unused)

    def has_weight(self) -> Bool[Array, ""]:
        """Whether anything in the batches counts."""
        return jnp.any(jnp.stack([jnp.asarray(term.batch.total) > 0 for term in self.terms]))


class CostPoint(NamedTuple):
    """A cost at its parameters, after the forward passes on which the metric is measured."""

    cost: Cost
    params: PyTree
    points: list[TermPoint]

    def value_and_gradient(self) -> tuple[Scalar, Float[Array, " P"]]:
        """The cost over whole batches and its gradient as a vector.

        If the metric uses whole batches, one forward pass gives both. Otherwise the examples of the fraction are run
        twice, which was faster than gathering the remaining examples."""

        def value_and_gradient(term: BatchTerm) -> tuple[Scalar, PyTree]:
            return jax.value_and_grad(term.loss)(self.params)

        losses, gradients = [], []
        for term, point in zip(self.cost.terms, self.points, strict=True):
            if point.gives_batch_loss:
                loss, gradient = point.loss_and_gradient()
            else:
                loss, gradient = _in_pieces(value_and_gradient, term, self.cost.num_pieces)
            flat = _tree.flatten(gradient)[0]
            losses.append(point.weight * loss)
            gradients.append(jnp.asarray(point.weight, flat.dtype) * flat)
        return _tree.sum_leaves(losses), _tree.sum_leaves(gradients)

    def inner_products(self, vectors: Sequence[Array], unflatten: Callable[[Array], PyTree]) -> Float[Array, "k k"]:
        r"""$v_a^\top G v_b$ for the exact metric at the points."""
        return _tree.sum_leaves([point.weight * point.inner_products(vectors, unflatten) for point in self.points])

    def divergence(self, params: PyTree) -> Scalar:
        return _tree.sum_leaves([point.weight * point.divergence(params) for point in self.points])

    def is_coupled(self) -> Bool[Array, ""]:
        """Whether some outputs, computed one example at a time, are not the outputs of the batch."""
        are_coupled = [point.point.are_coupled for point in self.points]
        known = [jnp.any(rows) for rows in are_coupled if rows is not None]
        return jnp.any(jnp.stack(known)) if known else jnp.array(False)

    def is_valid(self) -> Bool[Array, ""]:
        """Whether every target is one that its objective can have."""

        def are_valid(term: BatchTerm, z: Output) -> Bool[Array, ""]:
            like = jax.tree.map(lambda leaf: jnp.zeros((term.batch.size, *leaf.shape[1:]), leaf.dtype), z)
            return jnp.all(term.are_valid(like))

        pairs = zip(self.cost.terms, self.points, strict=True)
        return jnp.all(jnp.stack([are_valid(term, point.z) for term, point in pairs]))

    def has_weight(self) -> Bool[Array, ""]:
        """Whether some batch has a positive weight, and each such batch also in the fraction used for the metric."""
        pairs = zip(self.cost.terms, self.points, strict=True)
        totals = [(jnp.asarray(term.batch.total), jnp.asarray(point.batch_term.batch.total)) for term, point in pairs]
        return self.cost.has_weight() & jnp.all(jnp.stack([(part > 0) | ~(whole > 0) for whole, part in totals]))


def every_so_many(batch: Batch, fraction: float, turn: Array) -> Batch:
    """A fraction of a batch: every so many examples, starting one later at every turn.

    Taken this way, every device keeps its share of a batch that is spread over many."""
    every = max(1, round(1 / fraction))
    size = batch.size // every
    if batch.x is None or every == 1 or size < 2:
        return batch

    def rows_of_turn(leaf: Array) -> Array:
        rows = leaf[: size * every].reshape(size, every, *leaf.shape[1:])
        return jax.lax.dynamic_index_in_dim(rows, turn % every, axis=1, keepdims=False)

    return jax.tree.map(rows_of_turn, batch)


def _term_point(whole: BatchTerm, params: PyTree, how: Pass) -> TermPoint:
    batch = every_so_many(whole.batch, how.fraction, how.turn)
    is_whole = batch is whole.batch
    term = whole if is_whole else whole.on(batch)
    if not how.has_sites:
        return TermPoint(term, term.map.at(params), is_whole)
    # Examples one by one may give something else than the batch, whose loss and gradient are wanted.
    point = term.map.with_sites(params, check=term.term.check)
    return TermPoint(term, point, is_whole and not point.program.coupling)


def _in_pieces(function: Callable[[BatchTerm], PyTree], term: BatchTerm, num_pieces: int) -> PyTree:
    """The weighted mean of a function over pieces of a batch, one after the other."""
    batch = term.batch
    size = -(-batch.size // num_pieces)
    count = batch.size // size
    if batch.x is None or num_pieces == 1 or count < 2:
        return function(term)

    def weighed(piece: Batch) -> PyTree:
        return _tree.scale(piece.total / batch.total, function(term.on(piece)))

    pieces = jax.tree.map(lambda leaf: leaf[: count * size].reshape(count, size, *leaf.shape[1:]), batch)
    zeros = _tree.zeros(jax.eval_shape(weighed, _tree.take(pieces, 0)))
    total, _ = jax.lax.scan(lambda total, piece: (_tree.add(total, weighed(piece)), None), zeros, pieces)
    if count * size == batch.size:
        return total
    return _tree.add(total, weighed(_tree.take(batch, slice(count * size, None))))


def _numbers(values: Array, ndim: int) -> Array:
    """Losses, if there is one number for every example or position."""
    if values.ndim != ndim:
        raise ValueError(
            f"The loss of one example must be one number, but has shape {values.shape[ndim:]}. Sum over the entries of "
            "the output."
        )
    return _tree.at_least_float32(values)


def _name(objective: AbstractObjective) -> str:
    return type(getattr(objective, "family", objective)).__name__


def _has_labels(objective: AbstractObjective) -> bool:
    return getattr(getattr(objective, "family", None), "observation_type", None) is int
