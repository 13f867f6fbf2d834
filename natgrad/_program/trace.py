"""Find the sites of a model, and run it on a batch with taps.

The model is traced on one example, so the axis of the examples never has to be followed through reshapes and scans;
`jax.vmap` puts it back when a batch is run. A walk through that program sorts its equations: an equation between free
values becomes an expression, an equation where one of them meets data becomes a site, and the others stay as they are.

A tap is a zero added to a result of a site. Its cotangent is the cotangent of the result, for every example."""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._check import is_concrete
from natgrad._model import num_examples
from natgrad._program import compat
from natgrad._program.call import call_of, compare_programs, shape_of
from natgrad._program.control_flow import plan_cond, plan_remat, plan_scan
from natgrad._program.plan import FreeCopy, Inputs, PlainEquation, Plan, Scope, Site, SiteEquation, Visit
from natgrad._program.values import Dependent, Free, Leaf, Value, constant, evaluate, is_floating, is_perturbed, results

# How to plan equations that hold programs: the reader of their parts, and the function that adds them to a plan.
CONTROL_FLOW = ((compat.scan, plan_scan), (compat.branches, plan_cond), (compat.rematerialised, plan_remat))


class Planner:
    """The walk through a program that turns its equations into expressions and instructions.

    `lengths` maps the number of a scan to its length."""

    def __init__(self):
        self.lengths: dict[int, int] = {}
        self._site_numbers = itertools.count()

    def new_loop(self, length: int) -> int:
        loop = len(self.lengths)
        self.lengths[loop] = length
        return loop

    def walk(self, plan: Plan, closed: compat.ClosedJaxpr, operands: Sequence[Value], scope: Scope) -> list[Value]:
        """Add the equations of a program to a plan; returns the results of the program."""
        jaxpr = closed.jaxpr
        env: dict[Any, Value] = dict(zip(jaxpr.constvars, map(constant, closed.constants), strict=True))
        env.update(zip(jaxpr.invars, operands, strict=True))

        def read(atom: Any) -> Value:
            return constant(atom.val) if compat.is_literal(atom) else env[atom]

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self._add_equation(plan, eqn, list(map(read, eqn.invars)), scope), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def as_dependent(self, plan: Plan, value: Value, scope: Scope) -> Dependent:
        """Make a value a dependent one. That is a site if the value is free and carries a gradient."""
        if isinstance(value, Dependent):
            return value
        output = Dependent(value.aval, scope.loops, bool(value.leaves))
        site = self._site(None, [value], [value.aval], scope)
        plan.instructions.append(SiteEquation(site, (output,)) if value.leaves else FreeCopy((value,), (output,)))
        return output

    def _add_equation(self, plan: Plan, eqn: compat.Equation, operands: list[Value], scope: Scope) -> Sequence[Value]:
        """Add an equation to a plan, unless it is free; returns its results."""
        if (inner := compat.call(eqn)) is not None:
            return self.walk(plan, inner, operands, scope)
        avals = [var.aval for var in eqn.outvars]
        free = [value for value in operands if isinstance(value, Free)]
        if len(free) == len(operands) and not shrinks(eqn, free):
            return results(eqn, free)
        is_perturbed_result = compat.name(eqn) != "stop_gradient" and any(map(is_perturbed, operands))
        outputs = tuple(Dependent(aval, scope.loops, is_perturbed_result and is_floating(aval)) for aval in avals)
        if any(value.leaves for value in free) and any(map(is_floating, avals)):
            for read, add_to_plan in CONTROL_FLOW:
                if read(eqn) is not None:
                    inner_results = add_to_plan(self, plan, eqn, operands, scope)
                    if inner_results is not None:
                        return inner_results
            plan.instructions.append(SiteEquation(self._site(eqn, operands, avals, scope), outputs))
        else:
            plan.instructions.append(PlainEquation(eqn, tuple(operands), outputs))
        return outputs

    def _site(self, eqn: compat.Equation | None, operands: Sequence[Value], avals: Sequence, scope: Scope) -> Site:
        floating = tuple(k for k, aval in enumerate(avals) if is_floating(aval))
        tapped_avals = tuple(avals[k] for k in floating)
        return Site(next(self._site_numbers), eqn, tuple(operands), floating, tapped_avals, *scope)


def shrinks(eqn: compat.Equation, operands: Sequence[Free]) -> bool:
    """Whether a product of free values is smaller than a parameter in it.

    Such a product is made a site, because its cotangent is then cheaper to keep for each example: learned queries
    times a weight, a learned initial state times a weight."""
    if compat.dot(eqn) is None and compat.convolution(eqn) is None:
        return False
    sizes = [math.prod(value.aval.shape) for value in operands if value.leaves]
    return math.prod(eqn.outvars[0].aval.shape) < max(sizes, default=0)


@dataclass(frozen=True, eq=False)
class Program:
    """The program of one example, and what is needed to run it on a batch.

    - `lengths`: the lengths of its scans, by their number.
    - `axes`: the axis of the examples in each leaf of the inputs, `None` for inputs that examples share.
    - `names`, `params`: paths of the parameters, and their shapes and dtypes.
    - `outputs`: the shapes of the outputs of the batch.
    - `coupling`: the primitive by which the program of the batch may couple examples; an empty string if it cannot.
    - `is_concrete`: whether the model has captured no array that is being traced.

    The *leaves* of a program are the parameters, then the inputs that all examples share."""

    plan: Plan
    sites: tuple[Site, ...]
    lengths: dict[int, int]
    axes: tuple[int | None, ...]
    num_examples: int
    names: tuple[str, ...]
    params: Any
    outputs: Any
    coupling: str
    is_concrete: bool

    @property
    def param_structs(self) -> list[Any]:
        return jax.tree.leaves(self.params)

    def leaves(self, params: PyTree, x: PyTree) -> list[Any]:
        shared = [leaf for leaf, axis in zip(jax.tree.leaves(x), self.axes, strict=True) if axis is None]
        return [*jax.tree.leaves(params), *shared]

    def run(
        self, leaves: list[Any], x: PyTree, inputs: Inputs, mapped: dict[int, Any], visit: Visit
    ) -> tuple[list[Any], list[Any]]:
        """The leaves of the outputs of a batch, and the records.

        Inputs of a site have the axes of its loops in front, and in front of these the axis of the examples, unless
        `mapped` has `None` in place of 0 for that site."""
        free = self.free_values(leaves)
        data = [(leaf, axis) for leaf, axis in zip(jax.tree.leaves(x), self.axes, strict=True) if axis is not None]

        def run_example(data, inputs):
            env = {**free, **dict(zip(self.plan.starts, data, strict=True))}
            return self.plan.run(env, inputs, visit)

        axes = [axis for _, axis in data]
        run_batch = jax.vmap(run_example, in_axes=(axes, mapped), axis_size=self.num_examples)
        return run_batch([leaf for leaf, _ in data], inputs)

    def free_values(self, leaves: list[Any]) -> dict[Free, Any]:
        """The arrays of all free values that a run needs."""
        wanted = list(dict.fromkeys(self.plan.free()))
        return dict(zip(wanted, evaluate(wanted, leaves), strict=True))

    def recorded(self) -> list[Dependent]:
        """The values that the derivatives of all sites need, in the order in which a run records them."""
        return list(self.plan.recorded(frozenset(value for site in self.sites for value in site.recorded)))

    def taps(self) -> Inputs:
        """A zero for every result of every site: the cotangent of a zero that is added is the result's."""
        return {site.number: self.zeros(site) for site in self.sites}

    def zeros(self, site: Site) -> list[Any]:
        """Taps for a site: zeros `N loops ...` like each of its floating-point results."""
        leading = self.num_examples, *(self.lengths[loop] for loop in site.loops)
        return [jnp.zeros((*leading, *aval.shape), aval.dtype) for aval in site.avals]


class TappedRun(NamedTuple):
    """A batch after its forward pass with taps.

    - `z`: the leaves of the outputs.
    - `records`: the recorded values.
    - `pull`: the map from cotangents of the outputs to cotangents of the inputs at sites, by the number of the site."""

    z: list[Any]
    records: dict[Dependent, Any]
    pull: Callable[[list[Any]], Inputs]


def linearise_with_taps(
    program: Program, leaves: list[Any], x: PyTree
) -> tuple[list[Any], Callable[[list[Any], Inputs], list[Any]], list[Any]]:
    """Run a batch with a tap at every result of every site: the leaves of the outputs, their derivative in the leaves
    of the parameters and in the taps, and the values recorded."""
    taps = program.taps()
    visit = Visit(add_taps, frozenset(value for site in program.sites for value in site.recorded))
    count = len(program.param_structs)
    params, shared = leaves[:count], leaves[count:]

    def run(params: list[Any], taps: Inputs) -> tuple[list[Any], list[Any]]:
        return program.run([*params, *shared], x, taps, dict.fromkeys(taps, 0), visit)

    return jax.linearize(run, params, taps, has_aux=True)


def visited(
    program: Program,
    leaves: list[Any],
    x: PyTree,
    inputs: Inputs,
    mapped: dict,
    probe: Callable,
    recorded: Iterable[Site],
) -> TappedRun:
    """Run a batch with a probe and `inputs` at every site, and record the values that the `recorded` sites need."""
    visit = Visit(probe, frozenset(value for site in recorded for value in site.recorded))
    # Where derivatives may depend on what is perturbed, parameters are differentiated as they are in the model,
    # although their cotangents are not used.
    count = len(program.param_structs) if program.plan.asks_what_is_perturbed() else 0

    def run(inputs: Inputs, params: list[Any]) -> tuple[list[Any], list[Any]]:
        return program.run([*params, *leaves[count:]], x, inputs, mapped, visit)

    z, pull, records = jax.vjp(run, inputs, leaves[:count], has_aux=True)
    records_by_value = dict(zip(program.plan.recorded(visit.wanted), records, strict=True))
    return TappedRun(z, records_by_value, lambda cotangents: pull(cotangents)[0])


def add_taps(site: Site, operands: list[Any], taps: list[Any]) -> list[Any]:
    """The probe that computes the results of a site and adds taps to them."""
    results = list(site.compute(operands))
    for k, tap in zip(site.results, taps, strict=True):
        results[k] = results[k] + tap
    return results


def trace_example(model: Callable, params: PyTree, x: PyTree, in_axes: PyTree) -> Program:
    """Trace a model on one example, and find the sites where its parameters meet the data."""
    count = num_examples(x, in_axes)
    call = call_of(model, params, x, in_axes)
    outputs, coupling = compare_programs(call, count)
    shared, data = call.split(jax.tree.leaves(x))

    def example_outputs(*arguments: list[Any]) -> list[Any]:
        return [leaf[0] for leaf in jax.tree.leaves(call.of_one(*arguments))]

    shapes = call.param_shapes, [shape_of(leaf) for leaf in shared], [shape_of(leaf, axis) for leaf, axis in data]
    closed = compat.closed_jaxpr(jax.make_jaxpr(example_outputs)(*shapes))
    plan, lengths = _plan(closed, len(call.param_shapes), len(shared))
    return Program(
        plan,
        tuple(plan.sites()),
        lengths,
        axes=call.axes,
        num_examples=count,
        names=_tree.names(params),
        params=_tree.structure(params),
        outputs=outputs,
        coupling=coupling,
        is_concrete=is_concrete(closed.constants),
    )


def _plan(closed: compat.ClosedJaxpr, num_params: int, num_shared: int) -> tuple[Plan, dict[int, int]]:
    """The plan of a program of (parameters, shared inputs, data), and the lengths of its scans."""
    variables = closed.jaxpr.invars
    leaves = [
        Leaf(var.aval, frozenset([index] if index < num_params else []), (), index)
        for index, var in enumerate(variables[: num_params + num_shared])
    ]
    data = [Dependent(var.aval, ()) for var in variables[num_params + num_shared :]]
    planner, plan = Planner(), Plan((), tuple(data))
    ends = planner.walk(plan, closed, [*leaves, *data], Scope())
    plan.ends = tuple(planner.as_dependent(plan, end, Scope()) for end in ends)
    return plan, planner.lengths
