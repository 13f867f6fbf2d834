"""What a step is taken on: terms, each with its model, objective and weight, and their batches."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from natgrad import _tree
from natgrad._check import is_concrete
from natgrad._model import num_examples, of_params
from natgrad._optimiser.objective import AbstractObjective, as_objective
from natgrad._types import Output, Scalar


class Term(eqx.Module):
    r"""One term of a problem: the mean over its batch of `objective` at `model(params, x)`, times `weight`.

    Its metric is that of the model, times the same weight."""

    model: Callable
    objective: AbstractObjective
    weight: Any

    def __init__(self, model: Any, objective: Any, weight: Any = 1.0):
        if not callable(model):
            raise TypeError(f"`Term` needs a function `model(params, x)`, but got `{type(model).__name__}`.")
        if is_concrete(weight) and not weight > 0:
            raise ValueError(f"`Term` needs a `weight` above 0, but got {weight}. Leave the term out to switch it off.")
        self.model = _tree.as_callable(model)
        self.objective = as_objective(objective, "`Term`")
        self.weight = weight


class Terms(eqx.Module):
    """A problem that is a sum of terms, each with a batch of its own: `Terms(interior=Term(...), boundary=...)`.

    Batches are then a mapping from the names of the terms."""

    terms: dict[str, Term]

    def __init__(self, **terms: Term):
        if not terms or not all(isinstance(term, Term) for term in terms.values()):
            raise TypeError("`Terms` needs at least one `name=Term(model, objective)`.")
        self.terms = terms


class Batch(NamedTuple):
    """Inputs, targets and weights of some examples."""

    x: PyTree
    y: PyTree = None
    weights: Float[Array, " N"] | None = None

    @property
    def size(self) -> int:
        return num_examples(self.x, "A batch")

    @property
    def total(self) -> Scalar | float:
        """The sum of the weights."""
        return float(self.size) if self.weights is None else jnp.sum(self.weights)

    def mean(self, values: Float[Array, " N"]) -> Scalar:
        """The mean over examples, weighted; zero if none of them counts."""
        if self.weights is None:
            return jnp.mean(values)
        weights = self.weights.astype(values.dtype)
        total = jnp.sum(weights)
        return jnp.sum(weights * values) / jnp.where(total > 0, total, 1.0)

    def map(self, function: Callable[[Array], Array]) -> "Batch":
        return Batch(*jax.tree.map(function, tuple(self)))


class Bound(NamedTuple):
    """A term with a batch, as a function of the trained parameters."""

    term: Term
    model: Callable
    batch: Batch

    def losses(self, z: Output) -> Float[Array, " N"]:
        """The loss of every example."""
        each = jax.vmap(self.term.objective.loss)(z, self.batch.y)
        if each.ndim != 1:
            raise ValueError(
                f"The loss of one example must be one number, but has shape {each.shape[1:]}. Sum over the entries of "
                "the output."
            )
        return _tree.at_least_float32(each)

    def loss(self, params: PyTree) -> Scalar:
        return self.mean_loss(of_params(self.model, self.batch.x, "`NaturalGradient`")(params))

    def mean_loss(self, z: Output) -> Scalar:
        return self.batch.mean(self.losses(z))


def as_terms(problem: Any, objective: Any) -> dict[str | None, Term]:
    """The terms of a problem, or a model with its objective as the only one."""
    if isinstance(problem, Terms):
        if objective is not None:
            raise ValueError("`NaturalGradient` got `Terms`, which have objectives of their own, and an `objective`.")
        return {**problem.terms}
    if objective is None:
        raise TypeError(
            "`NaturalGradient` needs an `objective` for its model: an exponential family, `LeastSquares()`, or "
            "`Objective(loss, geometry)`."
        )
    return {None: Term(problem, objective)}


def batches_of(terms: Mapping[str | None, Term], data: Any) -> Iterator[tuple[Term, Batch]]:
    """Every term with its batch."""
    if None in terms:
        yield terms[None], as_batch(data, "The batch")
        return
    if not isinstance(data, Mapping) or set(data) != set(terms):
        given = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
        raise ValueError(f"A problem of terms needs a batch for each, {sorted(map(str, terms))}, but got {given}.")
    for name, term in terms.items():
        yield term, as_batch(data[name], f"The batch of `{name}`")


def as_batch(data: Any, subject: str) -> Batch:
    if not isinstance(data, tuple | list) or len(data) not in (2, 3):
        raise TypeError(
            f"{subject} must be `(x, y)`, with `y=None` where there are no targets, or `(x, y, weights)`, but is "
            f"`{type(data).__name__}`" + (f" of length {len(data)}." if isinstance(data, tuple | list) else ".")
        )
    batch = Batch(*data)
    if batch.x is None:
        # A model without data has one example, without an axis for it.
        return Batch(None, jax.tree.map(_with_examples, batch.y))
    count = num_examples(batch.x, subject)
    for name, part in (("y", batch.y), ("weights", batch.weights)):
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(part)]
        if any(shape[:1] != (count,) for shape in shapes):
            raise ValueError(
                f"{subject} has {count} examples in `x`, but `{name}` has shapes {shapes}: every array needs the "
                "examples along its leading axis."
            )
    if batch.weights is not None and jnp.shape(batch.weights) != (count,):
        raise ValueError(f"{subject}: `weights` needs one number an example, but has {jnp.shape(batch.weights)}.")
    return batch


def _with_examples(leaf: Any) -> Any:
    """An array, or its shape, with an axis of one example in front."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype)
    return jnp.asarray(leaf)[None]
