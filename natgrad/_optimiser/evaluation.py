"""One forward pass of a batch, which serves the loss, its gradient, products with the metric and its statistics."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from natgrad import _tree
from natgrad._geometry.base import AbstractGeometry
from natgrad._optimiser.problem import Bound
from natgrad._point.batch import Batch
from natgrad._point.point import Point
from natgrad._types import Output, Scalar


class Part(NamedTuple):
    """Part of the batch of a term after its forward pass. `is_whole` says whether it is all of the batch, as that is
    given, so that its loss and gradient are those of the step."""

    bound: Bound
    point: Point
    is_whole: bool

    @property
    def z(self) -> Output:
        return self.point.z

    @property
    def weight(self):
        """How much of the metric it is: a part stands for the whole batch of its term."""
        return self.bound.term.weight

    @property
    def geometry(self) -> AbstractGeometry:
        return self.bound.term.objective.geometry

    def loss_and_gradient(self) -> tuple[Scalar, PyTree]:
        loss, cotangents = jax.value_and_grad(self.bound.mean_loss)(self.z)
        return loss, self.point.pull(cotangents)

    def inner_products(self, vectors: Sequence[Array], unflatten: Callable[[Array], PyTree]) -> Float[Array, "k k"]:
        r"""$v_a^\top G v_b$ for the exact metric of this part."""
        # One after the other: compiled once, and faster than to stack them.
        push = lambda k: self.point.push(unflatten(jax.lax.select_n(k, *vectors)))
        count = len(vectors)
        if count == 1:
            tangents = jax.tree.map(lambda z: z[None], self.point.push(unflatten(vectors[0])))
        else:
            tangents = jax.lax.map(push, jnp.arange(count, dtype=jnp.int32))
        covectors = jax.vmap(self.point.metric_mv)(tangents)
        product = lambda u, v: jnp.mean(jax.vmap(_tree.vdot)(u, v))
        return jax.vmap(lambda u: jax.vmap(lambda v: product(u, v))(covectors))(tangents)

    def divergence(self, params: PyTree) -> Scalar:
        """How far the outputs are from those at other parameters, in the geometry."""
        z = self.point.map(params)
        return self.bound.batch.mean(self.bound.weighed_sums(self.geometry.dissimilarity, z, self.z))


class Evaluation(NamedTuple):
    """The parts of the batches of a problem on which the metric is measured, after their forward passes."""

    parts: list[Part]

    def inner_products(self, vectors: Sequence[Array], unflatten: Callable[[Array], PyTree]) -> Float[Array, "k k"]:
        r"""$v_a^\top G v_b$ for the exact metric of the parts."""
        return _tree.sum_leaves([part.weight * part.inner_products(vectors, unflatten) for part in self.parts])

    def divergence(self, params: PyTree) -> Scalar:
        return _tree.sum_leaves([part.weight * part.divergence(params) for part in self.parts])

    def is_coupled(self) -> Bool[Array, ""]:
        """Whether the outputs of some part are not those of the batch."""
        found = [jnp.any(part.point.are_coupled) for part in self.parts if part.point.are_coupled is not None]
        return jnp.any(jnp.stack(found)) if found else jnp.array(False)

    def has_weight(self, problem: Sequence[Bound]) -> Bool[Array, ""]:
        """Whether something counts in the part of every batch in which something counts."""
        pairs = zip(problem, self.parts, strict=True)
        totals = [(jnp.asarray(whole.batch.total), jnp.asarray(part.bound.batch.total)) for whole, part in pairs]
        return jnp.all(jnp.stack([(part > 0) | ~(whole > 0) for whole, part in totals]))

    def is_valid(self, problem: Sequence[Bound]) -> Bool[Array, ""]:
        """Whether all targets of the batches are such that the objectives can have them."""
        like = lambda z, count: jax.tree.map(lambda leaf: jnp.zeros((count, *leaf.shape[1:]), leaf.dtype), z)
        pairs = zip(problem, self.parts, strict=True)
        valid = [jnp.all(bound.are_valid(like(part.z, bound.batch.size))) for bound, part in pairs]
        return jnp.all(jnp.stack(valid))


class Pass(NamedTuple):
    """How a model is run: on which fraction of every batch, at which turn, whether statistics of single examples are
    needed, and whether it is tested that outputs are those of the batch."""

    fraction: float
    turn: Array
    has_sites: bool
    check: bool = True


def evaluate(problem: Sequence[Bound], params: PyTree, how: Pass) -> Evaluation:
    """Run the model on a fraction of every batch, another one at every turn."""
    return Evaluation([_part(bound, params, how) for bound in problem])


def loss_and_gradient(
    problem: Sequence[Bound], evaluation: Evaluation, params: PyTree, pieces: int
) -> tuple[Scalar, Float[Array, " P"]]:
    """Over whole batches, the gradient as a vector: from the pass that serves the metric where that is of the whole
    batch. Elsewhere a part of it runs twice, which takes less time than to put the other examples together."""
    losses, gradients = [], []
    for bound, part in zip(problem, evaluation.parts, strict=True):
        if part.is_whole:
            loss, gradient = part.loss_and_gradient()
        else:
            one = lambda own: jax.value_and_grad(own.loss)(params)
            loss, gradient = _in_pieces(one, bound, pieces)
        flat = _tree.flatten(gradient)[0]
        losses.append(part.weight * loss)
        gradients.append(jnp.asarray(part.weight, flat.dtype) * flat)
    return _tree.sum_leaves(losses), _tree.sum_leaves(gradients)


def loss_at(problem: Sequence[Bound], params: PyTree, pieces: int = 1) -> Scalar:
    """The loss over whole batches."""
    each = [bound.term.weight * _in_pieces(lambda own: own.loss(params), bound, pieces) for bound in problem]
    return _tree.sum_leaves(each)


def part_of(batch: Batch, fraction: float, turn: Array) -> Batch:
    """A fraction of a batch: every so many examples, starting one later at every turn.

    Taken this way, every device keeps its share of a batch that is spread over many."""
    every = max(1, round(1 / fraction))
    kept = batch.size // every
    if batch.x is None or every == 1 or kept < 2:
        return batch

    def taken(leaf: Array) -> Array:
        rows = leaf[: kept * every].reshape(kept, every, *leaf.shape[1:])
        return jax.lax.dynamic_index_in_dim(rows, turn % every, axis=1, keepdims=False)

    return jax.tree.map(taken, batch)


def _part(whole: Bound, params: PyTree, how: Pass) -> Part:
    bound = whole._replace(batch=part_of(whole.batch, how.fraction, how.turn))
    is_whole = bound.batch is whole.batch
    if not how.has_sites:
        return Part(bound, bound.map.at(params), is_whole)
    # Examples one by one may give something else than the batch, whose loss and gradient are wanted.
    point = bound.map.with_sites(params, check=how.check)
    return Part(bound, point, is_whole and not point.program.coupling)


def _in_pieces(function: Callable[[Bound], PyTree], bound: Bound, pieces: int) -> PyTree:
    """The weighted mean of a function over pieces of a batch, one after the other."""
    batch = bound.batch
    size = -(-batch.size // pieces)
    count = batch.size // size
    if batch.x is None or pieces == 1 or count < 2:
        return function(bound)
    weighed = lambda own: _tree.scale(own.total / batch.total, function(bound._replace(batch=own)))
    stacked = jax.tree.map(lambda leaf: leaf[: count * size].reshape(count, size, *leaf.shape[1:]), batch)
    first = jax.eval_shape(weighed, jax.tree.map(lambda leaf: leaf[0], stacked))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), first)
    total, _ = jax.lax.scan(lambda total, own: (_tree.add(total, weighed(own)), None), zeros, stacked)
    if count * size == batch.size:
        return total
    return _tree.add(total, weighed(jax.tree.map(lambda leaf: leaf[count * size :], batch)))
