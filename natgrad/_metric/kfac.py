"""Kronecker-factored metrics."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._blocks.base import Assignment
from natgrad._blocks.choose import Rules, check_rules, choose
from natgrad._blocks.masks import check_mask, mask_outputs
from natgrad._blocks.report import make_report
from natgrad._check import is_concrete
from natgrad._geometry.base import AbstractGeometry
from natgrad._metric.blocks import BlockMetric, Blocks
from natgrad._metric.diagonal import factor_columns, sample_columns
from natgrad._metric.samples import bytes_of_column, forward_in
from natgrad._model import check_params, finite, num_examples
from natgrad._operator.base import AbstractBlock
from natgrad._per_example.chunks import summed
from natgrad._per_example.forward import Forward, check_model
from natgrad._types import Key, Output


def kfac(
    model: Callable,
    geometry: AbstractGeometry,
    params: PyTree,
    x: PyTree = None,
    *,
    key: Key | None = None,
    num_samples: int = 1,
    sharing: str = "expand",
    bias: str = "joint",
    mask: Any = None,
    strict: bool = False,
    structures: Mapping[str, str] | None = None,
    max_factor: int = 4096,
    oversized: str = "diagonal",
    in_axes: PyTree = 0,
    check: bool = True,
    budget: int = 2**26,
) -> BlockMetric:
    r"""The metric $\frac1N\sum_i J_i^\top G_z(z_i) J_i$ of `model(params, x)`, approximated by one Kronecker product
    $A \otimes G$ for every weight and its bias (K-FAC): $A$ is the second moment of the weight's inputs, $G$ that of
    the cotangents of its outputs.

    Weights are found by what the program does with them, whatever library wrote it, and every use is counted.
    Parameters that scale and shift units get a block of two for every unit, other small ones a dense block, both exact.
    The rest is diagonal, and `report()` says so and why.

    **Arguments:**

    - `key`: with a key, cotangents are `num_samples` draws of `geometry.sample` for every example; without, backward
      passes are exact, one for each column of `geometry.factor`.
    - `sharing`: what to do with the positions of one example that share a weight. `"expand"` takes each for an example
      of its own, right where each has its own term in the loss. `"reduce"` averages inputs and sums cotangents over
      them first, right where they are pooled.
    - `bias`: `"joint"` gives a weight and its bias one block, `"separate"` one each.
    - `mask`: zeros at positions that do not count (padding), an array of examples by positions, for the weights that
      are used at as many positions and for outputs that have them. A mapping gives weights masks of their own, by path,
      and `"z"` that of the outputs. Exact blocks are those of the outputs that count.
    - `strict`: whether to refuse a model in which some parameter would get less than its structure, instead of warning.
    - `structures`: `"kronecker"`, `"dense"` or `"diagonal"` for the parameters at or below a path.
    - `max_factor`: the largest factor to store. Above it that side of the product is diagonal, or with
      `oversized="blocked"` it is made of blocks that are no larger.
    - `in_axes`, `check`, `budget`: as for `per_example`.
    """
    rules = Rules(sharing, bias, {} if structures is None else structures, max_factor, oversized=oversized)
    request = Request("`kfac`", rules, key, num_samples, mask, strict, in_axes, check, budget)
    return request.build(_kfac, model, geometry, params, x)


class Request(eqx.Module):
    """What `kfac` and `ekfac` were asked for."""

    subject: str = eqx.field(static=True)
    rules: Rules = eqx.field(static=True)
    key: Key | None
    num_samples: int = eqx.field(static=True)
    mask: Any
    strict: bool = eqx.field(static=True)
    in_axes: PyTree = eqx.field(static=True)
    check: bool = eqx.field(static=True)
    budget: int = eqx.field(static=True)

    def build(
        self, compute: Callable, model: Callable, geometry: AbstractGeometry, params: PyTree, x: PyTree, *more: Any
    ) -> BlockMetric:
        subject = self.subject
        if not isinstance(self.num_samples, int) or self.num_samples < 1:
            raise ValueError(
                f"{subject} needs `num_samples` to be a whole number of at least 1, but got {self.num_samples}."
            )
        check_rules(self.rules, subject)
        check_params(params, subject)
        masks = check_mask(self.mask, num_examples(x, subject, self.in_axes), subject)
        if self.check:
            check_model(model, params, x, self.in_axes, subject)
        metric = compute(_tree.as_callable(model), geometry, params, x, self, masks, *more)
        report = metric.report()
        if report.fallbacks:
            found = "; ".join(f"`{row.path}` is {row.structure} ({row.reason})" for row in report.fallbacks)
            if self.strict:
                raise ValueError(
                    f"{subject} with `strict=True` needs a structure for every parameter, but {found}. Say what you "
                    "want for them with `structures={path: ...}`."
                )
            warnings.warn(f"{subject}: {found}. `report()` has the details.", stacklevel=3)
        _require_finite(metric, subject)
        return metric


def _require_finite(metric: BlockMetric, subject: str) -> None:
    """Refuse factors that are not finite, where they are known."""
    paths, operator = list(metric.report()), metric.operator
    if not is_concrete(operator):
        return
    places = zip(operator.places, operator.blocks, strict=True)
    bad = [paths[place.parts[0].leaf] for place, block in places if not bool(finite(block).holds)]
    if bad:
        raise ValueError(
            f"{subject} needs finite numbers in every factor, but those of {', '.join(f'`{path}`' for path in bad)} "
            "are not. Look for NaN or infinity in `params` and `x`, or for an overflow in the gradients."
        )


@eqx.filter_jit
def _kfac(model, geometry, params, x, request: Request, masks) -> BlockMetric:
    batch = prepared(model, geometry, params, x, request, masks)
    return batch.metric(batch.assignments, batch.blocks(batch.assignments))


class Batch(NamedTuple):
    """A batch after its forward pass, with the cotangents of its outputs and the blocks that were chosen."""

    forward: Forward
    columns: Output
    assignments: list[Assignment]

    def blocks(self, assignments: list[Assignment]) -> list[AbstractBlock]:
        """The blocks, from sums over examples and columns, as many columns at a time as the budget allows."""
        forward, columns = self.forward, self.columns
        recording = lambda part: forward.pull(part, is_stacked=True).recording()
        first = recording(jax.tree.map(lambda s: s[:1], columns))
        inputs = [one.of_inputs(first, forward.budget) for one in assignments]

        def sums(part: Output) -> list:
            here = recording(part)
            return [one.of_cotangents(here, forward.budget) for one in assignments]

        count = jax.tree.leaves(columns)[0].shape[0]
        total = summed(sums, columns, forward.budget.chunk(count, bytes_of_column(forward)))
        mean = jax.tree.map(lambda leaf: leaf / forward.trace.num_examples, total)
        return [one.block(*parts) for one, *parts in zip(assignments, inputs, mean, strict=True)]

    def metric(self, assignments: list[Assignment], blocks: list[AbstractBlock]) -> BlockMetric:
        trace = self.forward.trace
        leaves, treedef = jax.tree.flatten(trace.params)
        operator = Blocks(tuple(blocks), tuple(one.place for one in assignments), (tuple(leaves), treedef))
        report = make_report(trace, self.forward.routes, assignments, blocks)
        return BlockMetric(operator, report, jnp.asarray(float(trace.num_examples)))


def prepared(model, geometry, params, x, request: Request, masks) -> Batch:
    subject = request.subject
    forward = forward_in(geometry, model, params, x, request.in_axes, request.budget, subject.strip("`"))
    columns = mask_outputs(masks, _columns(geometry, forward.z, request), subject)
    return Batch(forward, columns, choose(forward.trace, forward.routes, request.rules, masks, subject))


def _columns(geometry: AbstractGeometry, z: Output, request: Request) -> Output:
    if request.key is None:
        return factor_columns(geometry, z)
    draws = sample_columns(geometry, z, request.key, request.num_samples)
    return _tree.scale(request.num_samples**-0.5, draws)
