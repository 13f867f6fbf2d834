"""A forward pass of a batch, from which the gradients of examples can be pulled back."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from natgrad._check import caller, require
from natgrad._model import coupling_message, differing, finite
from natgrad._point.per_example import PerExample
from natgrad._point.records import MemoryBudget
from natgrad._point.rematerialised import formed_in_backward
from natgrad._program.trace import Program, TappedRun, tapped, tapped_with_derivative, trace_example
from natgrad._types import Output
from natgrad._uses.parameter_uses import ParameterUses, find_uses, uses_of


class Forward(NamedTuple):
    """A model after its forward pass. Cotangents may be chosen in view of the outputs `z`, and several times."""

    program: Program
    parameters: tuple[ParameterUses, ...]
    leaves: list[Any]
    x: PyTree
    run: TappedRun
    budget: MemoryBudget
    # Raises while the program runs if the outputs are not those of the batch.
    guard: Callable[[list[Any]], list[Any]] | None = None

    @property
    def z(self) -> Output:
        return jax.tree.unflatten(jax.tree.structure(self.program.outputs), self.run.z)

    def pull(self, cotangents: Output, *, is_stacked: bool) -> PerExample:
        """The gradients of examples for cotangents like `z`, or with an axis of several in front."""
        shaped = [
            jnp.asarray(u).astype(z.dtype).reshape(-1, *z.shape)
            for u, z in zip(jax.tree.leaves(cotangents), self.run.z, strict=True)
        ]
        shaped = shaped if self.guard is None else self.guard(shaped)
        at_sites = jax.vmap(self.run.pull, out_axes=1)(shaped)
        records = [self.run.records[value] for value in self.program.recorded()]
        # Several cotangents share what is recorded, so their statistics are not formed one after the other.
        is_single = shaped[0].shape[0] == 1
        formed = [formed_in_backward(parameter, self.program.lengths) for parameter in self.parameters if is_single]
        found = tuple(one for one in formed if one is not None)
        return PerExample(
            self.leaves,
            self.x,
            shaped,
            records,
            at_sites,
            self.program,
            self.parameters,
            found,
            self.budget,
            is_stacked,
        )


def forward_pass(
    model: Callable, params: PyTree, x: PyTree, *, in_axes: PyTree, budget: int, check: bool = False
) -> Forward:
    """Find the sites of a model, and run the batch once.

    With `check`, a model whose program may couple examples is also run on the batch as it is, and if its outputs differ
    there is an error when gradients are pulled back."""
    program, leaves = traced(model, params, x, in_axes, budget)
    forward = _forward(program, leaves, x, tapped(program, leaves, x), budget)
    if check and program.coupling:
        is_coupled = jnp.any(differing(model(params, x), forward.z))
        message = coupling_message(program.coupling)
        forward = forward._replace(guard=lambda cotangents: eqx.error_if(cotangents, is_coupled, message))
    require(forward.z, [finite(forward.z)], f"{caller()}: the output of the model", traced=False)
    return forward


def forward_with_derivative(
    program: Program, leaves: list[Any], x: PyTree, budget: int = 2**26
) -> tuple[Forward, Callable[[PyTree], Output]]:
    """A forward pass, and from the same run the map from a change of the parameters to that of the outputs."""
    run, push = tapped_with_derivative(program, leaves, x)
    return _forward(program, leaves, x, run, budget), push


def traced(model, params, x, in_axes, budget: int) -> tuple[Program, list[Any]]:
    if budget < 1:
        raise ValueError(f"{caller()} needs a `budget` of at least one byte, but got {budget}.")
    program = trace_example(model, params, x, in_axes)
    return program, [jnp.asarray(leaf) for leaf in program.leaves(params, x)]


def _forward(program: Program, leaves: list[Any], x: PyTree, run: TappedRun, budget: int) -> Forward:
    parameters = tuple(
        find_uses(uses_of(program.sites, leaf), leaf, program.lengths) for leaf in range(len(program.names))
    )
    return Forward(program, parameters, leaves, x, run, MemoryBudget(budget))
