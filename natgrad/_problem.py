"""A problem: a model, an objective, initial parameters and data, with batches, losses and metrics."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._check import caller, public
from natgrad._family.categorical import Categorical, MinimalCategorical
from natgrad._model import check_outputs, check_params
from natgrad._optimiser.cost import Cost, term_on_batch
from natgrad._optimiser.method import compilable
from natgrad._optimiser.objective import LeastSquares, Likelihood
from natgrad._optimiser.term import Term, Terms, as_terms, batches_of
from natgrad._types import Scalar

# How many training examples, evenly spaced, the training loss is computed on.
SHOWN = 2000


class Score(NamedTuple):
    """The loss on the training data, the loss on the held-out data if there are any, and the metrics on the held-out
    data or else on the training data."""

    loss: Scalar
    held_out_loss: Scalar | None
    metrics: dict[str, Any]


class Problem(eqx.Module):
    """A model, its objective, initial parameters and data, for the command line to train and to compare.

    A problem is immutable, and a tree whose leaves are its arrays and functions: pass it to a function compiled by
    `equinox.filter_jit`, or compile one of its methods, `jax.jit(problem.loss)`.

    **Arguments:**

    - `model`: `model(params, x) -> z`; or a `Term` or `Terms`, with `objective=None`. A model that returns `(z, aux)`
      is `Term(model, objective, has_aux=True)`; `aux` is ignored.
    - `objective`: an exponential family, `LeastSquares()`, or `Objective(loss, geometry)`.
    - `params`: a tree of floating-point arrays.
    - `data`: `(x, y)` or `(x, y, weights)` with the examples along the leading axis; with `Terms`, a mapping from the
      name of a term to its data.
    - `batch_size`: number of examples of a step; by default all of them.
    - `held_out`: data like `data` that are not trained on; by default none.
    - `metrics`: a mapping from names to functions `metric(z, y)` of all outputs and targets that return one number. By
      default the accuracy for labels and the explained variance for `LeastSquares`.
    - `steps`: number of steps of a run, unless the command line says otherwise; default 500.
    - `name`, `about`: name and description for reports; default `"problem"` and none.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.linspace(-1.0, 1.0, 20)[:, None]
    problem = ng.Problem(lambda w, x: x @ w, ng.LeastSquares(), jnp.zeros((1, 1)), (x, 3 * x), batch_size=5)
    assert problem.batches_an_epoch == 4
    assert problem.loss(jnp.full((1, 1), 3.0), problem.batch(0)) == 0
    ```
    """

    model: Any
    objective: Any
    params: PyTree
    data: Any
    batch_size: int | None = eqx.field(static=True)
    held_out: Any
    metrics: dict[str, Callable]
    steps: int = eqx.field(static=True)
    name: str = eqx.field(static=True)
    about: str = eqx.field(static=True)
    # Counted once, since counting looks at all targets, and every step asks for it.
    num_examples: int = eqx.field(static=True)

    @public
    def __init__(
        self,
        model: Any,
        objective: Any,
        params: PyTree,
        data: Any,
        *,
        batch_size: Any = None,
        held_out: Any = None,
        metrics: Mapping[str, Callable] | None = None,
        steps: Any = 500,
        name: str = "problem",
        about: str = "",
    ):
        self.model, self.objective = model, objective
        self.steps, self.name, self.about = steps, name, about
        _check_whole("steps", steps)
        if batch_size is not None:
            _check_whole("batch_size", batch_size)
        check_params(params)
        self.num_examples = sum(batch.size for _, batch in batches_of(self.terms, data))
        self.params, self.data, self.held_out = jax.tree.map(jnp.asarray, (params, data, held_out))
        self.batch_size = None if batch_size is None or batch_size >= self.num_examples else batch_size
        self.metrics = dict(self._default_metrics() if metrics is None else metrics)
        self._check()

    @property
    def terms(self) -> dict[str | None, Term]:
        """The terms of the cost by name; the only term of a problem without `Terms` has the name `None`."""
        return as_terms(self.model, self.objective)

    @property
    def num_params(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    @property
    def num_held_out(self) -> int:
        return 0 if self.held_out is None else sum(batch.size for _, batch in batches_of(self.terms, self.held_out))

    @property
    def batches_an_epoch(self) -> int:
        """The number of whole batches in the training data."""
        return 1 if self.batch_size is None else self.num_examples // self.batch_size

    def rows(self, step: int, seed: int = 0) -> np.ndarray | None:
        """Indices of the examples of a step, or `None` for all examples.

        Every epoch visits the examples in another random order, and drops those that do not fill a batch. The indices
        depend on `step` and `seed` only, so an interrupted run can be resumed."""
        if self.batch_size is None:
            return None
        epoch, place = divmod(step, self.batches_an_epoch)
        order = _order(seed, epoch, self.num_examples)
        return order[place * self.batch_size : (place + 1) * self.batch_size]

    @public
    def batch(self, step: int = 0, seed: int = 0) -> Any:
        """The examples of a step."""
        return self.taken(self.data, self.rows(step, seed))

    @staticmethod
    def taken(data: Any, rows: Any) -> Any:
        """The examples with the indices `rows`; all of them if `rows` is `None`."""
        return data if rows is None else _tree.take(data, rows)

    @compilable
    @public
    def loss(self, params: PyTree, data: Any) -> Scalar:
        """The mean loss over some data; with `Terms`, the weighted sum over the terms."""
        return self._cost(params, data)(params)

    def shown(self) -> Any:
        """The training data on which the training loss is computed: at most 2000 examples, evenly spaced."""
        if len(self.terms) > 1 or self.num_examples <= SHOWN:
            return self.data
        return self.taken(self.data, np.linspace(0, self.num_examples - 1, SHOWN).astype(np.int32))

    @compilable
    @public
    def score(self, params: PyTree, shown: Any, held_out: Any) -> Score:
        """Losses on two sets of data, `held_out` may be `None`, and metrics on the latter or else on the former."""
        loss = self.loss(params, shown)
        held_out_loss = None if held_out is None else self.loss(params, held_out)
        evaluated = shown if held_out is None else held_out
        return Score(loss, held_out_loss, self._metric_values(params, evaluated))

    def _cost(self, params: PyTree, data: Any) -> Cost:
        """The terms with their batches, if the outputs of the model have the axis of examples."""
        terms = [term_on_batch(term, batch) for term, batch in batches_of(self.terms, data)]
        for term in terms:
            check_outputs(jax.eval_shape(term.map, params), term.batch.size)
        return Cost(terms)

    def _metric_values(self, params: PyTree, data: Any) -> dict[str, Any]:
        if not self.metrics or None not in self.terms:
            return {}
        ((term, batch),) = batches_of(self.terms, data)
        z = term.outputs(params) if batch.x is None else term.outputs(params, batch.x)
        return {name: jnp.asarray(metric(z, batch.y), float) for name, metric in self.metrics.items()}

    def _default_metrics(self) -> dict[str, Callable]:
        term = self.terms.get(None)
        objective = None if term is None else term.objective
        if isinstance(objective, Likelihood) and isinstance(objective.family, Categorical | MinimalCategorical):
            minimal = isinstance(objective.family, MinimalCategorical)
            return {"accuracy": minimal_accuracy if minimal else accuracy}
        ((_, batch), *_) = batches_of(self.terms, self.data)
        is_array = hasattr(batch.y, "shape")
        if isinstance(objective, LeastSquares) and batch.x is not None and is_array:
            return {"explained variance": explained_variance}
        return {}

    def _check(self) -> None:
        if self.batch_size is not None and isinstance(self.model, Terms):
            raise ValueError(
                f"{caller()} cannot split the data of `Terms` into batches, but got `batch_size={self.batch_size}`. "
                "Leave it out: every step then uses all data."
            )
        named = {"params": self.params, "data": self.data, "held_out": self.held_out}
        for name, tree in named.items():
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                array = np.asarray(leaf)
                if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
                    count, place = int((~np.isfinite(array)).sum()), f"{name}{jax.tree_util.keystr(path)}"
                    raise ValueError(
                        f"{caller()} got `{place}` with {count} of its {array.size} entries not finite, so the loss "
                        "would not be finite. Remove or replace NaN and infinities."
                    )
        for name, data in (("data", self.data), ("held_out", self.held_out)):
            if data is not None:
                self._cost(self.params, data).refuse_invalid(self.params, f"{caller()}: `{name}`")
        score = jax.eval_shape(self.score, self.params, self.data, self.held_out)
        for name, value in score.metrics.items():
            if value.shape:
                raise ValueError(
                    f"{caller()}: the metric `{name}` must be one number for all examples together, but has shape "
                    f"{value.shape}. Return its mean."
                )


def _check_whole(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{caller()} needs a whole number above 0 for `{name}`, but got {value!r}.")


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    """The random order of the examples in an epoch."""
    return np.random.default_rng([seed, epoch]).permutation(count).astype(np.int32)


def accuracy(z: Any, y: Any) -> Scalar:
    """The fraction of examples whose label has the largest logit."""
    return jnp.mean((jnp.argmax(z, axis=-1) == y).astype(float))


def minimal_accuracy(z: Any, y: Any) -> Scalar:
    """`accuracy` for logits without the last class."""
    return accuracy(jnp.concatenate([z, jnp.zeros_like(z[..., :1])], axis=-1), y)


def explained_variance(z: Any, y: Any) -> Scalar:
    """One minus the mean squared residual over the variance of the targets."""
    y = jnp.asarray(y).astype(z.dtype).reshape(z.shape)
    return 1 - jnp.sum((z - y) ** 2) / jnp.sum((y - jnp.mean(y, axis=0, keepdims=True)) ** 2)
