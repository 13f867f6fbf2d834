"""The program of one example, and a batch of it run with taps."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._model import check_outputs, example_axes, num_examples, of_params
from natgrad._sites import compat
from natgrad._sites.plan import Inputs, Plan, Site, Visit
from natgrad._sites.sites import Planner, Scope
from natgrad._sites.values import Dependent, Free, Leaf, evaluate


@dataclass(frozen=True, eq=False)
class Trace:
    """A model as it acts on one example: its plan, the sites in it, and where inputs and outputs go.

    Leaves are the parameters, then the inputs that all examples share."""

    plan: Plan
    sites: tuple[Site, ...]
    lengths: dict[int, int]
    axes: tuple[int | None, ...]
    num_examples: int
    names: tuple[str, ...]
    params: Any
    outputs: Any

    @property
    def param_structs(self) -> list[Any]:
        return jax.tree.leaves(self.params)

    def leaves(self, params: PyTree, x: PyTree) -> list[Any]:
        shared = [leaf for leaf, axis in zip(jax.tree.leaves(x), self.axes, strict=True) if axis is None]
        return [*jax.tree.leaves(params), *shared]

    def run(
        self, leaves: list[Any], x: PyTree, inputs: Inputs, mapped: dict[int, Any], visit: Visit
    ) -> tuple[list[Any], list[Any]]:
        """The leaves of the outputs of a batch, and the values recorded.

        The inputs of a site have the axes of its loops in front, and in front of these, where `mapped` says 0 and not
        `None`, that of the examples."""
        free = self.free_values(leaves)
        data = [(leaf, axis) for leaf, axis in zip(jax.tree.leaves(x), self.axes, strict=True) if axis is not None]

        def one(data, inputs):
            env = {**free, **dict(zip(self.plan.starts, data, strict=True))}
            return self.plan.run(env, inputs, visit)

        axes = [axis for _, axis in data]
        batched = jax.vmap(one, in_axes=(axes, mapped), axis_size=self.num_examples)
        return batched([leaf for leaf, _ in data], inputs)

    def free_values(self, leaves: list[Any]) -> dict[Free, Any]:
        """Every free value that meets the data, or is needed to compute with it."""
        wanted = list(dict.fromkeys(self.plan.free()))
        return dict(zip(wanted, evaluate(wanted, leaves), strict=True))

    def recorded(self) -> list[Dependent]:
        """The values that the derivatives of all sites need, in the order in which a run records them."""
        return list(self.plan.recorded(frozenset(value for site in self.sites for value in site.recorded)))

    def zeros(self, site: Site) -> list[Any]:
        """A zero for every floating-point result of a site, at every step of its loops and for every example."""
        lead = self.num_examples, *(self.lengths[loop] for loop in site.loops)
        return [jnp.zeros((*lead, *aval.shape), aval.dtype) for aval in site.avals]


class Tapped(NamedTuple):
    """A batch after its forward pass: the leaves of the outputs, the values recorded, and the map from cotangents of
    the outputs to the cotangents of what was passed in at the sites."""

    z: list[Any]
    records: dict[Dependent, Any]
    pull: Callable[[list[Any]], Inputs]


def tapped(trace: Trace, leaves: list[Any], x: PyTree) -> Tapped:
    """Run a batch with a zero added to every result of every site; the cotangent of that zero is the result's."""
    zeros = {site.number: trace.zeros(site) for site in trace.sites}
    return visited(trace, leaves, x, zeros, dict.fromkeys(zeros, 0), add_taps, trace.sites)


def tapped_with_derivative(trace: Trace, leaves: list[Any], x: PyTree) -> tuple[Tapped, Callable[[PyTree], PyTree]]:
    """As `tapped`, and from the same run the derivative of the outputs with respect to the parameters."""
    zeros = {site.number: trace.zeros(site) for site in trace.sites}
    visit = Visit(add_taps, frozenset(value for site in trace.sites for value in site.recorded))
    count = len(trace.param_structs)
    params, shared = leaves[:count], leaves[count:]
    run = lambda params, taps: trace.run([*params, *shared], x, taps, dict.fromkeys(zeros, 0), visit)
    z, forward, records = jax.linearize(run, params, zeros, has_aux=True)
    named = dict(zip(trace.plan.recorded(visit.wanted), records, strict=True))

    def push(v: PyTree) -> PyTree:
        return jax.tree.unflatten(jax.tree.structure(trace.outputs), forward(jax.tree.leaves(v), zeros))

    def pull(cotangents: list[Any]) -> Inputs:
        return jax.linear_transpose(forward, params, zeros)(cotangents)[1]

    return Tapped(z, named, pull), push


def visited(
    trace: Trace, leaves: list[Any], x: PyTree, inputs: Inputs, mapped: dict, probe: Callable, recorded: Iterable[Site]
) -> Tapped:
    """Run a batch with something passed in at every site, and record what the derivatives of some sites need."""
    visit = Visit(probe, frozenset(value for site in recorded for value in site.recorded))
    run = lambda inputs: trace.run(leaves, x, inputs, mapped, visit)
    z, pull, records = jax.vjp(run, inputs, has_aux=True)
    named = dict(zip(trace.plan.recorded(visit.wanted), records, strict=True))
    return Tapped(z, named, lambda cotangents: pull(cotangents)[0])


def add_taps(site: Site, operands: list[Any], taps: list[Any]) -> list[Any]:
    results = list(site.compute(operands))
    for k, tap in zip(site.results, taps, strict=True):
        results[k] = results[k] + tap
    return results


def trace_example(model: Callable, params: PyTree, x: PyTree, in_axes: PyTree, subject: str) -> Trace:
    """Find where the parameters of a model meet the data of one example."""
    count = num_examples(x, subject, in_axes)
    axes = tuple(example_axes(x, in_axes, subject)) if x is not None else ()
    leaves, treedef = jax.tree.flatten(x)
    param_leaves, param_treedef = jax.tree.flatten(params)
    kinds = [leaf for leaf, axis in zip(leaves, axes, strict=True) if axis is None]
    single = [(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True) if axis is not None]
    without_data = of_params(model, None, subject)
    whole = jax.eval_shape(without_data, params) if x is None else jax.eval_shape(model, params, x)
    check_outputs(whole, count, subject)

    def one(param_leaves, shared, data):
        params = jax.tree.unflatten(param_treedef, param_leaves)
        if x is None:
            return without_data(params)
        shared, data = iter(shared), iter(data)
        batch = [next(shared) if axis is None else jnp.expand_dims(next(data), axis) for axis in axes]
        return model(params, jax.tree.unflatten(treedef, batch))

    arguments = [shape_of(leaf) for leaf in param_leaves], [shape_of(leaf) for leaf in kinds]
    example = [shape_of(leaf, axis) for leaf, axis in single]
    _check_single(one, (*arguments, example), whole, subject)
    first = lambda *args: [leaf[0] for leaf in jax.tree.leaves(one(*args))]
    program = compat.program(jax.make_jaxpr(first)(*arguments, example))
    return _plan(program, params, kinds, axes, count, whole)


def _plan(program: compat.Program, params: PyTree, shared: Sequence, axes: tuple, count: int, whole: PyTree) -> Trace:
    num_params, num_leaves = len(jax.tree.leaves(params)), len(jax.tree.leaves(params)) + len(shared)
    variables = program.jaxpr.invars
    leaves = [
        Leaf(var.aval, frozenset([index] if index < num_params else []), (), index)
        for index, var in enumerate(variables[:num_leaves])
    ]
    data = [Dependent(var.aval, ()) for var in variables[num_leaves:]]
    planner, plan = Planner(), Plan((), tuple(data))
    ends = planner.walk(plan, program, [*leaves, *data], Scope())
    plan.ends = tuple(planner.as_dependent(plan, end, Scope()) for end in ends)
    sites = tuple(plan.sites())
    return Trace(plan, sites, planner.lengths, axes, count, _tree.names(params), _tree.structure(params), whole)


def _check_single(one: Callable, arguments: tuple, whole: PyTree, subject: str) -> None:
    """Refuse a model that does not work for a batch of one, or works differently there."""
    try:
        single = jax.eval_shape(one, *arguments)
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise ValueError(
            f"{subject}: the model works on the whole batch but fails on a batch of one example ({reason[0]}). Look "
            "for a hard-coded batch size, and use `x.shape[0]` in its place."
        ) from error
    expected = jax.tree.map(lambda leaf: (1, *leaf.shape[1:]), whole)
    given = jax.tree.map(lambda leaf: leaf.shape, single)
    if expected != given:
        raise ValueError(
            f"{subject}: for a batch of one example the output of the model has shape {given} instead of {expected}. "
            "Look for a `squeeze` without its `axis`, or for a hard-coded batch size."
        )


def shape_of(leaf: Any, without: int | None = None) -> jax.ShapeDtypeStruct:
    """The shape and dtype of a leaf, without one of its axes."""
    shape = list(jnp.shape(leaf))
    if without is not None:
        del shape[without]
    return jax.ShapeDtypeStruct(tuple(shape), getattr(leaf, "dtype", jnp.result_type(leaf)))
