"""One forward pass of a batch, which serves the loss, its gradient, products with the metric and its statistics."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from natgrad import _tree
from natgrad._metric.linearise import Linearisation, linearise_tapped, linearised
from natgrad._model import of_params
from natgrad._optimiser.problem import Batch, Bound
from natgrad._per_example.forward import Forward
from natgrad._types import Output, Scalar


class Part(NamedTuple):
    """Part of the batch of a term after its forward pass."""

    bound: Bound
    params: PyTree
    linearisation: Linearisation
    forward: Forward | None

    @property
    def z(self) -> Output:
        return self.linearisation.z

    @property
    def weight(self):
        """How much of the metric it is: a part stands for the whole batch of its term."""
        return self.bound.term.weight

    def loss_and_gradient(self) -> tuple[Scalar, PyTree]:
        loss, cotangents = jax.value_and_grad(self.bound.mean_loss)(self.z)
        return loss, self.linearisation.pull(cotangents)

    def inner_products(self, vectors: Sequence[Array], unflatten: Callable[[Array], PyTree]) -> Float[Array, "k k"]:
        r"""$v_a^\top G v_b$ for the exact metric of this part."""
        # One after the other: compiled once, and faster than to stack them.
        push = lambda k: self.linearisation.push(unflatten(jax.lax.select_n(k, *vectors)))
        count = len(vectors)
        if count == 1:
            tangents = jax.tree.map(lambda z: z[None], self.linearisation.push(unflatten(vectors[0])))
        else:
            tangents = jax.lax.map(push, jnp.arange(count, dtype=jnp.int32))
        geometry = self.bound.term.objective.geometry
        covectors = jax.vmap(jax.vmap(geometry.metric_mv), in_axes=(None, 0))(self.z, tangents)

        def product(u: Output, v: Output) -> Scalar:
            return self.bound.batch.mean(jax.vmap(_tree.vdot)(u, v))

        return jax.vmap(lambda u: jax.vmap(lambda v: product(u, v))(covectors))(tangents)

    def divergence(self, params: PyTree) -> Scalar:
        """How far the outputs are from those at other parameters, in the geometry."""
        z = of_params(self.bound.model, self.bound.batch.x, "`NaturalGradient`")(params)
        return self.bound.batch.mean(jax.vmap(self.bound.term.objective.geometry.dissimilarity)(z, self.z))

    def example_weights(self) -> Float[Array, " N"] | None:
        """Weights of examples with mean one."""
        weights = self.bound.batch.weights
        return None if weights is None else weights / jnp.mean(weights)


class Evaluation(NamedTuple):
    """The parts of the batches of a problem on which the metric is measured, after their forward passes."""

    parts: list[Part]

    def inner_products(self, vectors: Sequence[Array], unflatten: Callable[[Array], PyTree]) -> Float[Array, "k k"]:
        r"""$v_a^\top G v_b$ for the exact metric of the parts."""
        return _tree.sum_leaves([part.weight * part.inner_products(vectors, unflatten) for part in self.parts])

    def divergence(self, params: PyTree) -> Scalar:
        return _tree.sum_leaves([part.weight * part.divergence(params) for part in self.parts])


def evaluate(problem: Sequence[Bound], params: PyTree, fraction: float, turn: Array, has_sites: bool) -> Evaluation:
    """Run the model on a fraction of every batch, another one at every turn."""
    parts = [bound._replace(batch=part_of(bound.batch, fraction, turn)) for bound in problem]
    return Evaluation([_part(bound, params, has_sites) for bound in parts])


def loss_and_gradient(
    problem: Sequence[Bound], evaluation: Evaluation, params: PyTree, pieces: int
) -> tuple[Scalar, Float[Array, " P"]]:
    """Over whole batches, the gradient as a vector: from the pass that serves the metric where that is of the whole
    batch. Elsewhere a part of it runs twice, which takes less time than to put the other examples together."""
    losses, gradients = [], []
    for bound, part in zip(problem, evaluation.parts, strict=True):
        if part.bound.batch is bound.batch:
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

    return batch.map(taken)


def _part(bound: Bound, params: PyTree, has_sites: bool) -> Part:
    if has_sites:
        return Part(bound, params, *linearise_tapped(bound.model, params, bound.batch.x, "`NaturalGradient`"))
    function = of_params(bound.model, bound.batch.x, "`NaturalGradient`")
    return Part(bound, params, linearised(function, params), None)


def _in_pieces(function: Callable[[Bound], PyTree], bound: Bound, pieces: int) -> PyTree:
    """The weighted mean of a function over pieces of a batch, one after the other."""
    batch = bound.batch
    size = -(-batch.size // pieces)
    count = batch.size // size
    if batch.x is None or pieces == 1 or count < 2:
        return function(bound)
    weighed = lambda own: _tree.scale(own.total / batch.total, function(bound._replace(batch=own)))
    stacked = batch.map(lambda leaf: leaf[: count * size].reshape(count, size, *leaf.shape[1:]))
    first = jax.eval_shape(weighed, stacked.map(lambda leaf: leaf[0]))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), first)
    total, _ = jax.lax.scan(lambda total, own: (_tree.add(total, weighed(own)), None), zeros, stacked)
    if count * size == batch.size:
        return total
    return _tree.add(total, weighed(batch.map(lambda leaf: leaf[count * size :])))
