"""Where parameters meet data: the walk through the program of one example."""

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
from natgrad._program.plan import FreeCopy, Inputs, PlainEquation, Plan, Site, SiteEquation, Visit
from natgrad._program.values import Dependent, Free, Leaf, Value, constant, evaluate, is_floating, is_perturbed, results


class Scope(NamedTuple):
    """What surrounds an equation: the scans it is inside of, and whether it is computed again in the backward pass."""

    loops: tuple[int, ...] = ()
    is_rematerialised: bool = False


class Planner:
    """Goes through a program once and sorts its equations: free ones become expressions, the others steps of a plan.

    `lengths` are those of the scans, by their number."""

    def __init__(self):
        self.lengths: dict[int, int] = {}
        self._numbers = itertools.count()

    def new_loop(self, length: int) -> int:
        loop = len(self.lengths)
        self.lengths[loop] = length
        return loop

    def walk(self, plan: Plan, closed: compat.ClosedJaxpr, operands: Sequence[Value], scope: Scope) -> list[Value]:
        """Add the equations of a program to a plan. Returns the program's results."""
        jaxpr = closed.jaxpr
        env: dict[Any, Value] = dict(zip(jaxpr.constvars, map(constant, closed.constants), strict=True))
        env.update(zip(jaxpr.invars, operands, strict=True))
        read = lambda atom: constant(atom.val) if compat.is_literal(atom) else env[atom]
        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self._equation(plan, eqn, list(map(read, eqn.invars)), scope), strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def as_dependent(self, plan: Plan, value: Value, scope: Scope) -> Dependent:
        """The value as one that depends on the example. If it carries a gradient, that is a site."""
        if isinstance(value, Dependent):
            return value
        output = Dependent(value.aval, scope.loops, bool(value.leaves))
        site = self._site(None, [value], [value.aval], scope)
        plan.steps.append(SiteEquation(site, (output,)) if value.leaves else FreeCopy((value,), (output,)))
        return output

    def _equation(self, plan: Plan, eqn: compat.Equation, operands: list[Value], scope: Scope) -> Sequence[Value]:
        if (inner := compat.call(eqn)) is not None:
            return self.walk(plan, inner, operands, scope)
        avals = [var.aval for var in eqn.outvars]
        free = [value for value in operands if isinstance(value, Free)]
        if len(free) == len(operands) and not shrinks(eqn, free):
            return results(eqn, free)
        carries = compat.name(eqn) != "stop_gradient" and any(map(is_perturbed, operands))
        outputs = tuple(Dependent(aval, scope.loops, carries and is_floating(aval)) for aval in avals)
        if any(value.leaves for value in free) and any(map(is_floating, avals)):
            for is_one, plan_it in (
                (compat.scan, plan_scan),
                (compat.branches, plan_cond),
                (compat.rematerialised, plan_remat),
            ):
                if is_one(eqn) is not None and (planned := plan_it(self, plan, eqn, operands, scope)) is not None:
                    return planned
            plan.steps.append(SiteEquation(self._site(eqn, operands, avals, scope), outputs))
        else:
            plan.steps.append(PlainEquation(eqn, tuple(operands), outputs))
        return outputs

    def _site(self, eqn: compat.Equation | None, operands: Sequence[Value], avals: Sequence, scope: Scope) -> Site:
        floating = tuple(k for k, aval in enumerate(avals) if is_floating(aval))
        tapped = tuple(avals[k] for k in floating)
        return Site(next(self._numbers), eqn, tuple(operands), floating, tapped, *scope)


def shrinks(eqn: compat.Equation, operands: Sequence[Free]) -> bool:
    """Whether a product of free values is smaller than a parameter in it, so that its cotangent is the cheaper one to
    keep for each example: learned queries times a weight, a learned initial state times a weight."""
    if compat.dot(eqn) is None and compat.convolution(eqn) is None:
        return False
    sizes = [math.prod(value.aval.shape) for value in operands if value.leaves]
    return math.prod(eqn.outvars[0].aval.shape) < max(sizes, default=0)


@dataclass(frozen=True, eq=False)
class Program:
    """A model as it acts on one example: its plan, the sites in it, where inputs and outputs go, the primitive by which
    the program of a batch may couple examples (an empty string if it cannot), and whether the model has captured
    nothing that is being traced.

    Leaves are the parameters, then the inputs that all examples share."""

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

    def taps(self) -> Inputs:
        """A zero for every result of every site: the cotangent of a zero that is added is the result's."""
        return {site.number: self.zeros(site) for site in self.sites}

    def zeros(self, site: Site) -> list[Any]:
        """A zero for every floating-point result of a site, at every step of its loops and for every example."""
        lead = self.num_examples, *(self.lengths[loop] for loop in site.loops)
        return [jnp.zeros((*lead, *aval.shape), aval.dtype) for aval in site.avals]


class TappedRun(NamedTuple):
    """A batch after its forward pass: the leaves of the outputs, the values recorded, and the map from cotangents of
    the outputs to the cotangents of what was passed in at the sites."""

    z: list[Any]
    records: dict[Dependent, Any]
    pull: Callable[[list[Any]], Inputs]


def tapped_with_derivative(
    program: Program, leaves: list[Any], x: PyTree
) -> tuple[list[Any], Callable[[list[Any], Inputs], list[Any]], list[Any]]:
    """Run a batch with a zero added to every result of every site: the leaves of the outputs, their derivative with
    respect to the leaves of the parameters and to the zeros, and the values recorded."""
    zeros = program.taps()
    visit = Visit(add_taps, frozenset(value for site in program.sites for value in site.recorded))
    count = len(program.param_structs)
    params, shared = leaves[:count], leaves[count:]
    run = lambda params, taps: program.run([*params, *shared], x, taps, dict.fromkeys(zeros, 0), visit)
    return jax.linearize(run, params, zeros, has_aux=True)


def visited(
    program: Program,
    leaves: list[Any],
    x: PyTree,
    inputs: Inputs,
    mapped: dict,
    probe: Callable,
    recorded: Iterable[Site],
) -> TappedRun:
    """Run a batch with something passed in at every site, and record what the derivatives of some sites need.

    Parameters are differentiated too where rules ask what is perturbed, although their cotangents are not used."""
    visit = Visit(probe, frozenset(value for site in recorded for value in site.recorded))
    count = len(program.param_structs) if program.plan.asks_what_is_perturbed() else 0
    run = lambda inputs, params: program.run([*params, *leaves[count:]], x, inputs, mapped, visit)
    z, pull, records = jax.vjp(run, inputs, leaves[:count], has_aux=True)
    named = dict(zip(program.plan.recorded(visit.wanted), records, strict=True))
    return TappedRun(z, named, lambda cotangents: pull(cotangents)[0])


def add_taps(site: Site, operands: list[Any], taps: list[Any]) -> list[Any]:
    results = list(site.compute(operands))
    for k, tap in zip(site.results, taps, strict=True):
        results[k] = results[k] + tap
    return results


def trace_example(model: Callable, params: PyTree, x: PyTree, in_axes: PyTree) -> Program:
    """Find where the parameters of a model meet the data of one example."""
    count = num_examples(x, in_axes)
    call = call_of(model, params, x, in_axes)
    whole, coupling = compare_programs(call, count)
    shared, data = call.split(jax.tree.leaves(x))
    first = lambda *arguments: [leaf[0] for leaf in jax.tree.leaves(call.of_one(*arguments))]
    shapes = call.param_shapes, [shape_of(leaf) for leaf in shared], [shape_of(leaf, axis) for leaf, axis in data]
    closed = compat.closed_jaxpr(jax.make_jaxpr(first)(*shapes))
    return _plan(closed, params, shared, call.axes, count, whole, coupling)


def _plan(
    closed: compat.ClosedJaxpr, params: PyTree, shared: Sequence, axes: tuple, count: int, whole: PyTree, coupling: str
) -> Program:
    num_params, num_leaves = len(jax.tree.leaves(params)), len(jax.tree.leaves(params)) + len(shared)
    variables = closed.jaxpr.invars
    leaves = [
        Leaf(var.aval, frozenset([index] if index < num_params else []), (), index)
        for index, var in enumerate(variables[:num_leaves])
    ]
    data = [Dependent(var.aval, ()) for var in variables[num_leaves:]]
    planner, plan = Planner(), Plan((), tuple(data))
    ends = planner.walk(plan, closed, [*leaves, *data], Scope())
    plan.ends = tuple(planner.as_dependent(plan, end, Scope()) for end in ends)
    sites = tuple(plan.sites())
    names, structs = _tree.names(params), _tree.structure(params)
    is_closed = is_concrete(closed.constants)
    return Program(plan, sites, planner.lengths, axes, count, names, structs, whole, coupling, is_closed)
