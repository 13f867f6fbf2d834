"""What a step is taken on: terms, each with its model, objective and weight, and their batches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from natgrad import _tree
from natgrad._check import are_met, caller, is_concrete, public, show
from natgrad._model import without_aux
from natgrad._optimiser.batch import as_batch
from natgrad._optimiser.objective import AbstractObjective, as_objective
from natgrad._point.batch import Batch, check_weights, inverse_or_zero, spread, with_counted
from natgrad._point.point import OutputMap
from natgrad._types import Output, Scalar


class Term(eqx.Module):
    r"""One term of a problem: the mean over its batch of `objective` at `model(params, x)`, times `weight`. Its metric
    is that of the model, times the same weight.

    **Arguments:**

    - `model`: `model(params, x) -> z`.
    - `objective`: an exponential family, `LeastSquares()`, or `Objective(loss, geometry)`.
    - `weight`: a number above 0.
    - `has_aux`: whether the model returns `(z, aux)`; `aux` is then in `info`.
    - `check`: whether `NaturalGradient.init` tests, on concrete data, that the model treats examples independently and
      that per-example gradients are correct (which costs compiling and running one gradient), and whether a step is
      refused with the result `coupled` if examples turn out to be coupled later. With `check=False`, a model that
      couples examples is trained with the gradient of the whole batch and a metric computed from examples one by one.
      `Exact` does not need per-example gradients and is not tested.

    ```python
    import natgrad as ng

    model = lambda w, x: (x @ w, {"inputs": x})
    ng.NaturalGradient(ng.Term(model, ng.LeastSquares(), has_aux=True))
    ```
    """

    model: Callable
    objective: AbstractObjective
    weight: Any
    has_aux: bool = eqx.field(static=True)
    check: bool = eqx.field(static=True)

    @public
    def __init__(self, model: Any, objective: Any, weight: Any = 1.0, *, has_aux: bool = False, check: bool = True):
        if not callable(model):
            raise TypeError(f"`Term` needs a function `model(params, x)`, but got `{type(model).__name__}`.")
        if callable(weight) or (is_concrete(weight) and not weight > 0):
            raise ValueError(
                f"`Term` needs a `weight` above 0, one number, but got {weight}. Leave the term out to switch it off."
            )
        self.model = _tree.as_callable(model)
        self.objective = as_objective(objective)
        self.weight = weight
        self.has_aux, self.check = has_aux, check

    @property
    def outputs(self) -> Callable:
        """The model without what it returns besides its outputs."""
        return without_aux(self.model, self.has_aux)


class Terms(eqx.Module):
    """A problem that is a sum of terms, each with a batch of its own: `Terms(interior=Term(...), boundary=...)`.

    Batches are then a mapping from the names of the terms."""

    terms: dict[str, Term]

    @public
    def __init__(self, **terms: Term):
        if not terms or not all(isinstance(term, Term) for term in terms.values()):
            raise TypeError("`Terms` needs at least one `name=Term(model, objective)`.")
        self.terms = terms


class Bound(NamedTuple):
    """A term with a batch, as a function of the trained parameters."""

    term: Term
    model: Callable
    batch: Batch

    @property
    def map(self) -> OutputMap:
        return OutputMap(self.model, self.batch, self.term.objective.geometry)

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
        each = _numbers(function(z, other), weights.ndim)
        most = self.batch.example_weights
        assert most is not None
        share = weights.astype(each.dtype) * spread(inverse_or_zero(most.astype(each.dtype)), weights)
        return jnp.sum(jnp.where(is_counted, share * each, 0.0).reshape(len(each), -1), axis=1)

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
        """Raise if a concrete target cannot be one, with its place and value. Of `z` only shapes matter."""
        if not is_concrete((self.batch.y, self.batch.weights)):
            return
        like = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), z)
        with jax.ensure_compile_time_eval():
            wrong = np.argwhere(~np.asarray(self.are_valid(like)))
        if not len(wrong):
            return
        place = tuple(int(k) for k in wrong[0])
        at = lambda tree: jax.tree.map(lambda leaf: np.asarray(leaf)[place], tree)
        requirements = self.term.objective.requirements(at(like), at(self.batch.y))
        unmet = next((one for one in requirements if not bool(jnp.all(one.holds))), None)
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


def refuse_invalid(problem: Sequence[Bound], params: PyTree, label: str | None = None) -> None:
    """Raise if a concrete target or weight cannot be one, or if nothing in concrete batches counts."""
    # A compiled step looks at its batch itself, and the model is not traced once more for this.
    if not is_concrete([bound.batch for bound in problem]):
        return
    for bound in problem:
        z = jax.eval_shape(lambda params, bound=bound: bound.map(params), params)
        bound.refuse_invalid(z, label)
    counts = has_weight(problem)
    if is_concrete(counts) and not counts:
        raise ValueError(
            f"{label or caller()}: the weights of the batch are all zero, so there is nothing to learn from. "
            "Skip this batch."
        )


def has_weight(problem: Sequence[Bound]) -> Bool[Array, ""]:
    """Whether anything in the batches counts."""
    return jnp.any(jnp.stack([jnp.asarray(bound.batch.total) > 0 for bound in problem]))


def _numbers(each: Array, ndim: int) -> Array:
    if each.ndim != ndim:
        raise ValueError(
            f"The loss of one example must be one number, but has shape {each.shape[ndim:]}. Sum over the entries of "
            "the output."
        )
    return _tree.at_least_float32(each)


def _name(objective: AbstractObjective) -> str:
    return type(getattr(objective, "family", objective)).__name__


def _has_labels(objective: AbstractObjective) -> bool:
    return getattr(getattr(objective, "family", None), "observation_type", None) is int


def as_terms(problem: Any, objective: Any, has_aux: bool = False) -> dict[str | None, Term]:
    """The terms of a problem, or a model with its objective as the only one."""
    if isinstance(problem, Term | Terms):
        if objective is not None:
            raise ValueError(
                f"{caller()} got `{type(problem).__name__}`, which has objectives of its own, and an `objective`. "
                "Leave that out."
            )
        if has_aux:
            raise ValueError(
                "`has_aux=True` is for a model; with `Terms`, pass it to each term: `Term(..., has_aux=True)`."
            )
        return {None: problem} if isinstance(problem, Term) else {**problem.terms}
    if objective is None:
        raise TypeError(
            f"{caller()} needs an `objective` for its model: an exponential family, `LeastSquares()`, or "
            "`Objective(loss, geometry)`."
        )
    return {None: Term(problem, objective, has_aux=has_aux)}


def batches_of(terms: Mapping[str | None, Term], data: Any) -> Iterator[tuple[Term, Batch]]:
    """Every term with its batch."""
    if None in terms:
        yield terms[None], as_batch(data, "The batch", terms[None].objective)
        return
    if not isinstance(data, Mapping) or set(data) != set(terms):
        given = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
        raise ValueError(f"A problem of terms needs a batch for each, {sorted(map(str, terms))}, but got {given}.")
    for name, term in terms.items():
        yield term, as_batch(data[name], f"The batch of `{name}`", term.objective)
