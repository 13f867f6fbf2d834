"""Terms of a cost, each with its model, objective and weight, and the batches that the user gives for them."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._check import as_number, caller, is_concrete, public
from natgrad._model import num_examples, without_aux
from natgrad._optimiser.objective import AbstractObjective, as_objective
from natgrad._point.batch import Batch, Weights


class Term(eqx.Module):
    r"""One term of a cost: the mean of `objective` at `model(params, x)` over its batch, times `weight`.

    Its metric is the metric of the model, times the same weight.

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
        # A weight of one stays out of the program.
        self.weight = 1.0 if isinstance(weight, int | float) and weight == 1 else as_number(weight)
        self.has_aux, self.check = has_aux, check

    @property
    def outputs(self) -> Callable:
        """The model without what it returns besides its outputs."""
        return without_aux(self.model, self.has_aux)


class Terms(eqx.Module):
    """A problem that is a sum of terms, each with a batch of its own: `Terms(interior=Term(...), boundary=...)`.

    Batches are then a mapping from the names of the terms.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng

    model = lambda w, x: x @ w
    terms = ng.Terms(data=ng.Term(model, ng.LeastSquares()), edge=ng.Term(model, ng.LeastSquares(), weight=4.0))
    opt = ng.NaturalGradient(terms)
    x, w = jnp.array([[1.0], [2.0]]), jnp.zeros((1, 1))
    batch = {"data": (x, 3 * x), "edge": (jnp.ones((1, 1)), jnp.ones((1, 1)))}
    w, state, info = jax.jit(opt.step)(w, opt.init(w, batch), batch)
    assert jnp.allclose(info.loss, 11.25 + 4 * 0.5)
    ```
    """

    terms: dict[str, Term]

    @public
    def __init__(self, **terms: Term):
        if not terms or not all(isinstance(term, Term) for term in terms.values()):
            raise TypeError("`Terms` needs at least one `name=Term(model, objective)`.")
        self.terms = terms


def as_terms(problem: Any, objective: Any) -> dict[str | None, Term]:
    """The terms of a problem, or a model with its objective as the only one."""
    if isinstance(problem, Term | Terms):
        if objective is not None:
            raise ValueError(
                f"{caller()} got `{type(problem).__name__}`, which has objectives of its own, and an `objective`. "
                "Leave that out."
            )
        return {None: problem} if isinstance(problem, Term) else {**problem.terms}
    if objective is None:
        raise TypeError(
            f"{caller()} needs an `objective` for its model: an exponential family, `LeastSquares()`, or "
            "`Objective(loss, geometry)`."
        )
    return {None: Term(problem, objective)}


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


def aux_of(terms: Mapping[str | None, Term], params: PyTree, data: Any) -> PyTree:
    """What models return besides their outputs, on whole batches: of the only term, or by the names of terms."""

    def aux(term: Term, batch: Batch) -> PyTree:
        return term.model(params, *([] if batch.x is None else [batch.x]))[1]

    pairs = zip(terms, batches_of(terms, data), strict=True)
    by_name = {name: aux(*pair) for name, pair in pairs if pair[0].has_aux}
    return by_name.get(None) if None in terms else by_name or None


def as_batch(data: Any, label: str, objective: AbstractObjective) -> Batch:
    """Inputs, targets and weights, of which those that the objective ignores are zero."""
    if isinstance(data, Batch):
        batch = data
    elif isinstance(data, tuple | list) and len(data) in (2, 3):
        batch = Batch(*data)
    else:
        raise TypeError(
            f"{label} must be `(x, y)`, with `y=None` where there are no targets, or `(x, y, weights)`, or a `Batch`, "
            f"but is `{type(data).__name__}`" + (f" of length {len(data)}." if isinstance(data, tuple | list) else ".")
        )
    if any(axis != 0 for axis in batch.axes):
        raise ValueError(
            f"{label} needs the examples along the leading axis of every array in `x`, but its `in_axes` are "
            f"{batch.axes}. Move the axis in the model, or put arrays that all examples share into the parameters."
        )
    if batch.x is None and batch.weights is not None:
        raise ValueError(f"{label} has no `x`, so that there are no examples to weigh. Leave the weights out.")
    if batch.x is None:
        # A model without data has one example, without an axis for it.
        return Batch(None, jax.tree.map(_with_examples, batch.y))
    count = num_examples(batch.x, label=label)
    for name, part in (("y", batch.y), ("weights", batch.weights), ("mask", batch.mask)):
        shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(part)]
        if any(shape[:1] != (count,) for shape in shapes):
            raise ValueError(
                f"{label} has {count} examples in `x`, but `{name}` has shapes {shapes}: every array needs the "
                "examples along its leading axis."
            )
    if len(jax.tree.leaves(batch.weights)) > 1:
        raise TypeError(
            f"{label}: `weights` must be one array, but is {jax.tree.structure(batch.weights)}. Give each term of "
            "`Terms` its own."
        )
    return batch.with_weights(_counted(batch, objective))


def _counted(batch: Batch, objective: AbstractObjective) -> Weights | None:
    """The weights of a batch, and zeros where the objective ignores a target."""
    weights = batch.weights
    if weights is not None:
        weights = jnp.asarray(weights)
        weights = (
            _tree.at_least_float32(weights) if jnp.issubdtype(weights.dtype, jnp.floating) else weights.astype(float)
        )
    counted = None if batch.y is None else objective.counted(batch.y)
    if counted is None:
        return weights
    if weights is None:
        return counted.astype(float)
    ndim = max(counted.ndim, weights.ndim)
    weights, counted = (x.reshape(*x.shape, *(1,) * (ndim - x.ndim)) for x in (weights, counted))
    return jnp.where(counted, weights, 0.0)


def _with_examples(leaf: Any) -> Any:
    """An array, or its shape, with an axis of one example in front."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype)
    return jnp.asarray(leaf)[None]
