"""Metrics over more data than fits in memory."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._check import is_concrete, public
from natgrad._metric.base import AbstractMetric
from natgrad._metric.block_metric import BlockMetric
from natgrad._metric.diagonal import DiagonalMetric
from natgrad._metric.pullback import PullbackMetric
from natgrad._metric.running import refuse_bases
from natgrad._text import track
from natgrad._types import Key


class LoaderMetric(AbstractMetric):
    """The average of a metric over batches, weighted by their numbers of examples, or by their total weights.

    Every product, diagonal or matrix is one pass over the loader, driven from Python, one compiled step a batch;
    only one
    batch is in memory. It therefore cannot be used inside `jit`; `natgrad.solve` drives its iterations from Python
    too."""

    _source: "_Source" = eqx.field(static=True)
    _structure: tuple = eqx.field(static=True)

    def _mv(self, v):
        if not is_concrete(v):
            raise TypeError(
                "A metric over a data loader cannot be traced: its products run through the loader in Python. Call it "
                "outside `jit`, and solve with `natgrad.solve(..., solver=natgrad.CG())`."
            )
        return self._average("mv", v)

    def as_matrix(self):
        return self._average("as_matrix")

    def diagonal(self):
        return self._average("diagonal")

    @property
    def is_traceable(self):
        return False

    def _sample(self, key: Key):
        """Batches are independent: their samples add like random variables."""
        parts, counts = [], []
        for index, batch in enumerate(self._batches()):
            part, count = self._source.compiled("sample", batch, jax.random.fold_in(key, index))
            parts.append(_tree.scale(count**0.5, part))
            counts.append(count)
        return _tree.scale(1 / sum(counts) ** 0.5, _tree.add(*parts))

    def in_structure(self):
        leaves, treedef = self._structure
        return jax.tree.unflatten(treedef, leaves)

    def _average(self, method: str, *arguments: PyTree) -> PyTree:
        total, weight = None, 0
        for batch in self._batches():
            part, count = self._source.compiled(method, batch, *arguments)
            part = _tree.scale(count, part)
            total, weight = (part if total is None else _tree.add(total, part)), weight + count
        return _tree.scale(1 / weight, total)

    def _batches(self) -> Iterable[Any]:
        return track(self._source.batches, "metric over batches", show=self._source.progress)


@dataclasses.dataclass(eq=False)
class _Source:
    """Where the batches come from. Compared by identity, as data loaders are."""

    batches: Iterable[Any]
    compiled: Callable
    progress: bool


@public
def accumulate(
    build: Callable[[Any], Any], batches: Iterable[Any], *, progress: bool = True
) -> LoaderMetric | DiagonalMetric | BlockMetric:
    """The metric of all the data in `batches`, where `build(batch)` gives the metric of one batch.

    For instance, `build` is `lambda x: pullback(model, geometry, params, x)`.

    For a diagonal, `lambda batch: diagonal(model, geometry, params, batch[0], key=batch[1])`, that is one pass, and
    the answer is a diagonal metric with its standard errors added up. For `kfac` it is one pass too, and the factors
    are averaged. Otherwise `batches` is gone through once a product, so it must be iterable again and again (a list, or
    a data loader; not a generator). Batches of equal size are compiled once.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    batches = [jnp.array([[1.0]]), jnp.array([[2.0]])]
    metric = ng.accumulate(lambda x: ng.pullback(lambda w, x: x @ w, ng.Euclidean(), jnp.zeros((1, 1)), x), batches)
    assert jnp.allclose(metric.mv(jnp.ones((1, 1))), 2.5)  # the mean of 1 and 4
    ```
    """
    if iter(batches) is batches:
        raise TypeError(
            "`accumulate` goes through the batches once for every product, but got an iterator, which is empty after "
            "the first. Pass a list or an object with `__iter__`, such as a data loader."
        )
    first = next(iter(batches), None)
    if first is None:
        raise ValueError("`accumulate` got no batches.")
    metric = eqx.filter_eval_shape(build, first)
    if isinstance(metric, BlockMetric):
        return _average_blocks(eqx.filter_jit(build), track(batches, "blocks over batches", show=progress))
    if isinstance(metric, DiagonalMetric):
        return _average_diagonal(eqx.filter_jit(build), track(batches, "diagonal over batches", show=progress))
    if not isinstance(metric, PullbackMetric):
        raise TypeError(
            f"`accumulate` needs `build` to return the metric of a batch, such as `pullback(...)` or "
            f"`diagonal(...)`, but got `{type(metric).__name__}`."
        )

    @eqx.filter_jit
    def compiled(method: str, batch: Any, *arguments: PyTree):
        metric = build(batch)
        return getattr(metric, method)(*arguments), jnp.asarray(metric.point.total_weight, float)

    leaves, treedef = jax.tree.flatten(metric.in_structure())
    return LoaderMetric(_Source(batches, compiled, progress), (tuple(leaves), treedef))


def _average_diagonal(build: Callable[[Any], DiagonalMetric], batches: Iterable[Any]) -> DiagonalMetric:
    """The average over batches, weighted by their examples. Their errors are independent: variances add."""
    total, variance, count = None, None, 0
    for batch in batches:
        part = build(batch)
        entries = _tree.scale(part.num_examples, part.entries)
        total = entries if total is None else _tree.add(total, entries)
        if part.standard_error is not None:
            squares = jax.tree.map(lambda error: (part.num_examples * error) ** 2, part.standard_error)  # noqa: B023
            variance = squares if variance is None else _tree.add(variance, squares)
        count += part.num_examples
    error = None if variance is None else jax.tree.map(lambda v: jnp.sqrt(v) / count, variance)
    return DiagonalMetric(_tree.scale(1 / count, total), error, count)


def _average_blocks(build: Callable[[Any], BlockMetric], batches: Iterable[Any]) -> BlockMetric:
    """The average of every factor, weighted by examples."""
    parts = ((metric := build(batch), _tree.scale(metric.num_examples, metric.operator)) for batch in batches)
    first, total = next(parts)
    refuse_bases(first)
    count = first.num_examples
    for metric, weighed in parts:
        total, count = _tree.add(total, weighed), count + metric.num_examples
    return BlockMetric(_tree.scale(1 / count, total), first.report(), count)
