"""A forward pass of a batch, from which the gradients of examples can be pulled back."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from natgrad._check import is_concrete, require
from natgrad._model import check_examples, check_params, finite
from natgrad._per_example.chunks import Budget
from natgrad._per_example.in_backward import formed_in_backward
from natgrad._per_example.operator import PerExample
from natgrad._sites.routes import Route, find_route, uses_of
from natgrad._sites.trace import Tapped, Trace, tapped, tapped_with_derivative, trace_example
from natgrad._types import Output


class Forward(NamedTuple):
    """A model after its forward pass. Cotangents may be chosen in view of the outputs `z`, and several times."""

    trace: Trace
    routes: tuple[Route, ...]
    leaves: list[Any]
    x: PyTree
    run: Tapped
    budget: Budget

    @property
    def z(self) -> Output:
        return jax.tree.unflatten(jax.tree.structure(self.trace.outputs), self.run.z)

    def pull(self, cotangents: Output, *, is_stacked: bool) -> PerExample:
        """The gradients of examples for cotangents like `z`, or with an axis of several in front."""
        shaped = [
            jnp.asarray(u).astype(z.dtype).reshape(-1, *z.shape)
            for u, z in zip(jax.tree.leaves(cotangents), self.run.z, strict=True)
        ]
        at_sites = jax.vmap(self.run.pull, out_axes=1)(shaped)
        records = [self.run.records[value] for value in self.trace.recorded()]
        # Several cotangents share what is recorded, so their statistics are not formed one after the other.
        is_single = shaped[0].shape[0] == 1
        formed = [formed_in_backward(route, self.trace.lengths) for route in self.routes if is_single]
        found = tuple(one for one in formed if one is not None)
        return PerExample(
            self.leaves, self.x, shaped, records, at_sites, self.trace, self.routes, found, self.budget, is_stacked
        )


def check_model(model: Callable, params: PyTree, x: PyTree, in_axes: PyTree, subject: str) -> None:
    """Refuse, where everything is concrete, a model whose outputs are not finite or depend on other examples."""
    if x is None or not is_concrete((params, x)):
        return
    trace_example(model, params, x, in_axes, subject)
    z = model(params, x)
    require(z, [finite(z)], f"{subject}: the output of the model", traced=False)
    check_examples(model, params, x, z, subject, in_axes)


def forward_pass(model: Callable, params: PyTree, x: PyTree, *, in_axes: PyTree, budget: int, subject: str) -> Forward:
    """Find the sites of a model, and run the batch once."""
    trace, leaves = _traced(model, params, x, in_axes, budget, subject)
    forward = _forward(trace, leaves, x, tapped(trace, leaves, x), budget)
    require(forward.z, [finite(forward.z)], f"{subject}: the output of the model", traced=False)
    return forward


def forward_with_derivative(
    model: Callable, params: PyTree, x: PyTree, *, in_axes: PyTree, budget: int, subject: str
) -> tuple[Forward, Callable[[PyTree], Output]]:
    """As `forward_pass`, and from the same run the map from a change of the parameters to that of the outputs."""
    trace, leaves = _traced(model, params, x, in_axes, budget, subject)
    run, push = tapped_with_derivative(trace, leaves, x)
    return _forward(trace, leaves, x, run, budget), push


def _traced(model, params, x, in_axes, budget: int, subject: str) -> tuple[Trace, list[Any]]:
    if budget < 1:
        raise ValueError(f"{subject} needs a `budget` of at least one byte, but got {budget}.")
    trace = trace_example(model, params, x, in_axes, subject)
    return trace, [jnp.asarray(leaf) for leaf in trace.leaves(params, x)]


def _forward(trace: Trace, leaves: list[Any], x: PyTree, run: Tapped, budget: int) -> Forward:
    routes = tuple(find_route(uses_of(trace.sites, leaf), leaf, trace.lengths) for leaf in range(len(trace.names)))
    return Forward(trace, routes, leaves, x, run, Budget(budget))


def per_example(
    model: Callable,
    params: PyTree,
    x: PyTree,
    cotangents: PyTree,
    *,
    in_axes: PyTree = 0,
    check: bool = True,
    budget: int = 2**26,
) -> PerExample:
    r"""The gradients $g_i = J_i^\top u_i$ of single examples as a linear map, at the cost of about one gradient.

    **Arguments:**

    - `model`: `model(params, x) -> z`, with examples along the leading axis of `z`. With `x=None` it is
      `model(params)`, one example.
    - `cotangents`: $u_i$, like the outputs: for the gradients of a loss, its derivative with respect to `z`. An axis in
      front of all leaves gives several to each example, for which the forward pass is shared. A function
      `z -> cotangents` sees the outputs without a second forward pass.
    - `in_axes`: as in `jax.vmap`, where the examples are in `x`: an axis, `None` for arrays that all examples share, or
      a tree of these.
    - `check`: whether to test, on concrete data, that the model treats examples independently.
    - `budget`: how many bytes may be used at once for what has to be formed for each example.
    """
    subject = "`per_example`"
    check_params(params, subject)
    if check:
        check_model(model, params, x, in_axes, subject)
    forward = forward_pass(model, params, x, in_axes=in_axes, budget=budget, subject=subject)
    if callable(cotangents):
        cotangents = cotangents(forward.z if x is not None else jax.tree.map(lambda z: z[0], forward.z))
    return forward.pull(cotangents, is_stacked=check_cotangents(cotangents, forward.trace.outputs, x, subject))


def check_cotangents(cotangents: PyTree, outputs: PyTree, x: PyTree, subject: str) -> bool:
    """Whether there is an axis of several cotangents an example; anything else unlike the outputs is refused."""
    without_data = (lambda shape: shape[1:]) if x is None else (lambda shape: shape)
    expected = jax.tree.map(lambda leaf: without_data(leaf.shape), outputs)
    given = jax.tree.map(jnp.shape, cotangents)
    if given == expected:
        return False
    leaves, structure = jax.tree.flatten(cotangents)
    shapes = [jnp.shape(leaf) for leaf in leaves]
    if structure == jax.tree.structure(outputs):
        sizes = {shape[:1] for shape in shapes}
        same = all(u[1:] == without_data(z.shape) for u, z in zip(shapes, jax.tree.leaves(outputs), strict=True))
        if same and len(sizes) == 1 and sizes.isdisjoint({(), (0,)}):
            return True
    raise ValueError(
        f"{subject} needs `cotangents` like the outputs of the model, of shape {expected}, perhaps with one more axis "
        f"in front, but got {given}."
    )
