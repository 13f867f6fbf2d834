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

    def inner_products(self, vectors: PyTree) -> Float[Array, "k k"]:
        r"""$v_a^\top G v_b$ for stacked vectors and the exact metric of this part."""
        tangents = jax.vmap(self.linearisation.push)(vectors)
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
    """A problem at a point: the parts of its batches that were kept for the metric, and the rest of them."""

    parts: list[Part]
    rest: list[list[Bound]]

    def loss_and_gradient(self, params: PyTree, in_pieces: bool) -> tuple[Scalar, Float[Array, " P"]]:
        """Over whole batches, the gradient as a vector. The rest is worked through in one go, or in pieces as large as
        what was kept."""
        losses, gradients = [], []
        for part, rest in zip(self.parts, self.rest, strict=True):
            total = part.bound.batch.total + sum(bound.batch.total for bound in rest)
            found = [(part.bound, part.loss_and_gradient())]
            piece = part.bound.batch.size if in_pieces else None
            found += [(bound, _loss_and_gradient(bound, params, piece)) for bound in rest]
            for bound, (loss, gradient) in found:
                share = part.weight * bound.batch.total / total
                flat = _tree.flatten(gradient)[0]
                losses.append(share * loss)
                gradients.append(jnp.asarray(share, flat.dtype) * flat)
        return _tree.sum_leaves(losses), _tree.sum_leaves(gradients)

    def inner_products(self, vectors: PyTree) -> Float[Array, "k k"]:
        r"""$v_a^\top G v_b$ for stacked vectors and the exact metric of the parts."""
        return _tree.sum_leaves([part.weight * part.inner_products(vectors) for part in self.parts])

    def divergence(self, params: PyTree) -> Scalar:
        return _tree.sum_leaves([part.weight * part.divergence(params) for part in self.parts])


def evaluate(problem: Sequence[Bound], params: PyTree, fraction: float, turn: Array, has_sites: bool) -> Evaluation:
    """Run the model on a fraction of every batch, another one at every turn."""
    batches = [split(bound.batch, fraction, turn) for bound in problem]
    parts = [
        _part(bound._replace(batch=kept), params, has_sites) for bound, (kept, _) in zip(problem, batches, strict=True)
    ]
    rest = [[bound._replace(batch=own) for own in others] for bound, (_, others) in zip(problem, batches, strict=True)]
    return Evaluation(parts, rest)


def loss_at(problem: Sequence[Bound], params: PyTree, pieces: int = 1) -> Scalar:
    """The loss over whole batches."""
    each = [
        bound.term.weight * _in_pieces(lambda one: one.loss(params), bound, -(-bound.batch.size // pieces))
        for bound in problem
    ]
    return _tree.sum_leaves(each)


def split(batch: Batch, fraction: float, turn: Array) -> tuple[Batch, list[Batch]]:
    """A fraction of a batch, every so many examples, and the rest. Counting starts one later at every turn.

    Taken this way, every device keeps its share of a batch that is spread over many."""
    count = batch.size
    every = max(1, round(1 / fraction))
    if batch.x is None or every == 1 or count < 2 * every:
        return batch, []
    kept = count // every

    def strided(leaf: Array) -> Array:
        rows = leaf[: kept * every].reshape(kept, every, *leaf.shape[1:])
        return jnp.roll(rows, -(turn % every), axis=1)

    first = batch.map(lambda leaf: strided(leaf)[:, 0])
    others = batch.map(
        lambda leaf: jnp.concatenate([strided(leaf)[:, 1:].reshape(-1, *leaf.shape[1:]), leaf[kept * every :]])
    )
    return first, [others]


def _part(bound: Bound, params: PyTree, has_sites: bool) -> Part:
    if has_sites:
        return Part(bound, *linearise_tapped(bound.model, params, bound.batch.x, "`NaturalGradient`"))
    function = of_params(bound.model, bound.batch.x, "`NaturalGradient`")
    return Part(bound, linearised(function, params), None)


def _loss_and_gradient(bound: Bound, params: PyTree, piece: int | None) -> tuple[Scalar, PyTree]:
    one = lambda bound: jax.value_and_grad(bound.loss)(params)
    return one(bound) if piece is None else _in_pieces(one, bound, piece)


def _in_pieces(function: Callable[[Bound], PyTree], bound: Bound, piece: int) -> PyTree:
    """The weighted mean of a function over pieces of a batch of the given size, and what is left over."""
    batch = bound.batch
    count = batch.size // piece
    if batch.x is None or count * piece <= piece or batch.size == piece:
        return function(bound)
    weighed = lambda own: _tree.scale(own.total / batch.total, function(bound._replace(batch=own)))
    stacked = batch.map(lambda leaf: leaf[: count * piece].reshape(count, piece, *leaf.shape[1:]))
    first = jax.eval_shape(weighed, stacked.map(lambda leaf: leaf[0]))
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), first)
    total, _ = jax.lax.scan(lambda total, own: (_tree.add(total, weighed(own)), None), zeros, stacked)
    if count * piece == batch.size:
        return total
    return _tree.add(total, weighed(batch.map(lambda leaf: leaf[count * piece :])))
