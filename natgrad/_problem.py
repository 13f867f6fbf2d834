"""A problem whole: what to train, on which data, and how to judge it."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from natgrad._check import caller, public
from natgrad._family.categorical import Categorical, MinimalCategorical
from natgrad._model import check_params
from natgrad._optimiser.evaluation import loss_at
from natgrad._optimiser.objective import LeastSquares, Likelihood
from natgrad._optimiser.problem import Bound, Terms, as_terms, batches_of, refuse_invalid
from natgrad._types import Scalar

# How many examples, evenly spaced, the loss on the training data is looked at on.
SHOWN = 2000


class Score(NamedTuple):
    """How good parameters are: the loss on the training data (on at most 2000 examples of it), that on the held-out
    data if there is any, and metrics on the latter, or else on the former."""

    loss: Scalar
    held_out_loss: Scalar | None
    metrics: dict[str, Any]


class Problem:
    """A model, its objective, initial parameters and data: all that the command line needs to train and to compare.

    **Arguments:**

    - `model`: `model(params, x) -> z`; or `Terms`, with `objective=None`.
    - `objective`: an exponential family, `LeastSquares()`, or `Objective(loss, geometry)`.
    - `params`: a tree of floating-point arrays.
    - `data`: `(x, y)` or `(x, y, weights)` with the examples along the leading axis, of `Terms` a mapping to these.
    - `batch_size`: how many examples a step sees; by default all of them.
    - `held_out`: data like `data` that are not trained on.
    - `metrics`: functions `metric(z, y)` of the outputs for many examples and their targets that give one number each;
      by default the accuracy for labels and the explained part of the variance for `LeastSquares`.
    - `steps`: how many steps a run has unless the command line says otherwise.
    - `has_aux`: whether the model returns `(z, aux)`; `aux` is then left out.
    - `name`, `about`: for reports.
    """

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
        has_aux: bool = False,
        name: str = "problem",
        about: str = "",
    ):
        self.model, self.objective, self.has_aux = model, objective, has_aux
        self.terms = as_terms(model, objective, has_aux)
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
    def num_params(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    @property
    def num_held_out(self) -> int:
        return 0 if self.held_out is None else sum(batch.size for _, batch in batches_of(self.terms, self.held_out))

    @property
    def batches_an_epoch(self) -> int:
        return 1 if self.batch_size is None else self.num_examples // self.batch_size

    def rows(self, step: int, seed: int = 0) -> np.ndarray | None:
        """Which examples a step sees, `None` for all of them: none of them twice an epoch, in an order that depends on
        the seed. Those that are too few for one more batch wait for the next epoch. The same for every step of a
        number, so that a run can go on where it stopped."""
        if self.batch_size is None:
            return None
        epoch, place = divmod(step, self.batches_an_epoch)
        order = _order(seed, epoch, self.num_examples)
        return order[place * self.batch_size : (place + 1) * self.batch_size]

    def batch(self, step: int = 0, seed: int = 0) -> Any:
        """The examples of a step."""
        return self.taken(self.data, self.rows(step, seed))

    @staticmethod
    def taken(data: Any, rows: Any) -> Any:
        """Some of the examples."""
        return data if rows is None else jax.tree.map(lambda leaf: leaf[rows], data)

    def loss(self, params: PyTree, data: Any) -> Scalar:
        """The mean loss over some data; of `Terms`, their weighted sum."""
        return loss_at(self._bound(data), params)

    def shown(self) -> Any:
        """The training data that losses are looked at on."""
        if len(self.terms) > 1 or self.num_examples <= SHOWN:
            return self.data
        return self.taken(self.data, np.linspace(0, self.num_examples - 1, SHOWN).astype(np.int32))

    def score(self, params: PyTree, shown: Any, held_out: Any) -> Score:
        loss = self.loss(params, shown)
        held_out_loss = None if held_out is None else self.loss(params, held_out)
        judged = shown if held_out is None else held_out
        return Score(loss, held_out_loss, self._measured(params, judged))

    def _bound(self, data: Any) -> list[Bound]:
        return [Bound(term, term.outputs, own) for term, own in batches_of(self.terms, data)]

    def _measured(self, params: PyTree, data: Any) -> dict[str, Any]:
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
                f"`Problem` cannot cut the batches of `Terms`, but got `batch_size={self.batch_size}`. Leave it out to "
                "take all."
            )
        named = {"params": self.params, "data": self.data, "held_out": self.held_out}
        for name, tree in named.items():
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                own = np.asarray(leaf)
                if np.issubdtype(own.dtype, np.floating) and not np.isfinite(own).all():
                    count, where = int((~np.isfinite(own)).sum()), f"{name}{jax.tree_util.keystr(path)}"
                    raise ValueError(
                        f"`Problem` got `{where}` with {count} of its {own.size} entries not finite. Remove or replace "
                        "NaN and infinities first: a loss over them has no meaning."
                    )
        for name, data in (("data", self.data), ("held_out", self.held_out)):
            if data is not None:
                refuse_invalid(self._bound(data), self.params, f"{caller()}: `{name}`")
        score = jax.eval_shape(self.score, self.params, self.data, self.held_out)
        for name, value in score.metrics.items():
            if value.shape:
                raise ValueError(
                    f"`Problem`: the metric `{name}` must be one number for all examples together, but has shape "
                    f"{value.shape}. Take a mean."
                )


def _check_whole(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"`Problem` needs a whole number above 0 for `{name}`, but got {value!r}.")


@functools.lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(count).astype(np.int32)


def accuracy(z: Any, y: Any) -> Scalar:
    """The fraction of labels that are the likeliest."""
    return jnp.mean((jnp.argmax(z, axis=-1) == y).astype(float))


def minimal_accuracy(z: Any, y: Any) -> Scalar:
    """As `accuracy`, for outputs without the last class."""
    return accuracy(jnp.concatenate([z, jnp.zeros_like(z[..., :1])], axis=-1), y)


def explained_variance(z: Any, y: Any) -> Scalar:
    """One minus the mean squared residual over the variance of the targets."""
    y = jnp.asarray(y).astype(z.dtype).reshape(z.shape)
    return 1 - jnp.sum((z - y) ** 2) / jnp.sum((y - jnp.mean(y, axis=0, keepdims=True)) ** 2)
