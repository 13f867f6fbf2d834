"""Where parameters meet data: the walk through the program of one example."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from natgrad._sites import compat
from natgrad._sites.control_flow import plan_cond, plan_remat, plan_scan
from natgrad._sites.plan import Bind, Copy, Meet, Plan, Site
from natgrad._sites.values import Dependent, Free, Value, constant, is_floating, is_perturbed, results


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

    def walk(self, plan: Plan, program: compat.Program, operands: Sequence[Value], scope: Scope) -> list[Value]:
        """Add the equations of a program to a plan. Returns the program's results."""
        jaxpr = program.jaxpr
        env: dict[Any, Value] = dict(zip(jaxpr.constvars, map(constant, program.constants), strict=True))
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
        plan.steps.append(Meet(site, (output,)) if value.leaves else Copy((value,), (output,)))
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
            plan.steps.append(Meet(self._site(eqn, operands, avals, scope), outputs))
        else:
            plan.steps.append(Bind(eqn, tuple(operands), outputs))
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
