"""The program of one example as a list of instructions, run with a probe at every site.

A plan computes the dependent values from the free ones. The caller decides what happens at a site, by a probe: usually
compute the results and add a tap to them (`trace.add_taps`)."""

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp

from natgrad._program import compat
from natgrad._program.values import Dependent, Free, Value

Environment = dict[Value, Any]


@dataclass(frozen=True, eq=False)
class Site:
    """An equation in which a free value that carries a gradient meets the data.

    - `number`: counts the sites of a program.
    - `eqn`: the equation; `None` where a free value is itself used as a dependent one, as an output for example.
    - `results`, `avals`: positions and types of its floating-point results, which get taps.
    - `loops`: the scans around it, the outermost first.
    - `is_rematerialised`: whether it stands inside a `jax.checkpoint`.
    - `is_optional`: whether it stands in a branch that examples choose, so that some of them do not run it."""

    number: int
    eqn: compat.Equation | None
    operands: tuple[Value, ...]
    results: tuple[int, ...]
    avals: tuple[Any, ...]
    loops: tuple[int, ...]
    is_rematerialised: bool
    is_optional: bool

    def compute(self, operands: list[Any]) -> list[Any]:
        return [jnp.asarray(operands[0])] if self.eqn is None else compat.evaluate(self.eqn, operands)

    @property
    def primitive(self) -> str:
        return "output" if self.eqn is None else compat.name(self.eqn)

    @property
    def meeting(self) -> tuple[int, ...]:
        """The operands that carry a gradient to parameters."""
        return tuple(k for k, value in enumerate(self.operands) if isinstance(value, Free) and value.leaves)

    @functools.cached_property
    def asks_what_is_perturbed(self) -> bool:
        return self.eqn is not None and compat.asks_what_is_perturbed(self.eqn)

    @property
    def recorded(self) -> tuple[Dependent, ...]:
        """The dependent operands that the derivative of the equation needs. A sum needs none."""
        dependent = tuple(value for value in self.operands if isinstance(value, Dependent))
        return () if self.primitive in compat.SUMS_AND_DIFFERENCES else dependent


# Arrays passed in at each site, by its number: taps, for example.
Inputs = dict[int, Any]


class Scope(NamedTuple):
    """The scans around an equation, whether it is computed again in the backward pass (`jax.checkpoint`), and whether
    it stands in a branch that examples choose."""

    loops: tuple[int, ...] = ()
    is_rematerialised: bool = False
    is_optional: bool = False


class Visit(NamedTuple):
    """What a run does at each site, `probe(site, operands, inputs) -> results`, and which values it records."""

    probe: Callable[[Site, list[Any], Any], list[Any]]
    wanted: frozenset[Dependent]


class Instruction:
    """One thing that a plan does: compute the outputs from the operands."""

    operands: tuple[Value, ...]
    outputs: tuple[Dependent, ...]

    @abstractmethod
    def run(self, env: Environment, inputs: Inputs, visit: Visit) -> tuple[list[Any], list[Any]]:
        """The values of the outputs, and the records of inner plans."""

    def inner_plans(self) -> tuple["Plan", ...]:
        return ()

    def asks_what_is_perturbed(self) -> bool:
        return False


@dataclass(frozen=True, eq=False)
class PlainEquation(Instruction):
    """An equation in which no parameter meets the data."""

    eqn: compat.Equation
    operands: tuple[Value, ...]
    outputs: tuple[Dependent, ...]

    def run(self, env, inputs, visit):
        return compat.evaluate(self.eqn, [env[value] for value in self.operands]), []

    def asks_what_is_perturbed(self):
        return compat.asks_what_is_perturbed(self.eqn)


@dataclass(frozen=True, eq=False)
class SiteEquation(Instruction):
    """A site, where the probe of the run takes the place of the equation."""

    site: Site
    outputs: tuple[Dependent, ...]

    def run(self, env, inputs, visit):
        return visit.probe(self.site, [env[value] for value in self.operands], inputs[self.site.number]), []

    def asks_what_is_perturbed(self):
        return self.site.asks_what_is_perturbed

    @property
    def operands(self):  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.site.operands


@dataclass(frozen=True, eq=False)
class FreeCopy(Instruction):
    """A free value without a gradient that is used as a dependent one."""

    operands: tuple[Value, ...]
    outputs: tuple[Dependent, ...]

    def run(self, env, inputs, visit):
        return [jnp.asarray(env[self.operands[0]])], []


@dataclass(eq=False)
class Plan:
    """Instructions in order.

    - `loops`: the scans around the plan.
    - `starts`: the dependent values that it is given.
    - `ends`: the values that it returns."""

    loops: tuple[int, ...]
    starts: tuple[Dependent, ...] = ()
    instructions: list[Instruction] = field(default_factory=list)
    ends: tuple[Value, ...] = ()

    def run(self, env: Environment, inputs: Inputs, visit: Visit) -> tuple[list[Any], list[Any]]:
        """The values of `ends` and the records, for an environment with the free values and `starts`."""
        env, records = dict(env), []
        for instruction in self.instructions:
            outputs, inner_records = instruction.run(env, inputs, visit)
            env.update(zip(instruction.outputs, outputs, strict=True))
            records += inner_records
        records += [env[value] for value in self._defined() if value in visit.wanted]
        return [env[value] for value in self.ends], records

    def sites(self) -> Iterator[Site]:
        """All sites in order, also the sites of inner plans."""
        for instruction in self.instructions:
            if isinstance(instruction, SiteEquation):
                yield instruction.site
            for plan in instruction.inner_plans():
                yield from plan.sites()

    def asks_what_is_perturbed(self) -> bool:
        """Whether the derivative of some equation may depend on which of its operands are differentiated."""
        return any(
            instruction.asks_what_is_perturbed()
            or any(plan.asks_what_is_perturbed() for plan in instruction.inner_plans())
            for instruction in self.instructions
        )

    def free(self) -> Iterator[Free]:
        """Every free value that a run needs; some more than once."""
        for instruction in self.instructions:
            yield from (value for value in instruction.operands if isinstance(value, Free))
            for plan in instruction.inner_plans():
                yield from plan.free()
        yield from (value for value in self.ends if isinstance(value, Free))

    def restrict(self, inputs: Inputs) -> Inputs:
        """The inputs at the sites in this plan."""
        return {site.number: inputs[site.number] for site in self.sites()}

    def recorded(self, wanted: frozenset[Dependent]) -> Iterator[Dependent]:
        """The values among `wanted` that a run records, in the order of its records."""
        for instruction in self.instructions:
            for plan in instruction.inner_plans():
                yield from plan.recorded(wanted)
        yield from (value for value in self._defined() if value in wanted)

    def _defined(self) -> dict[Dependent, None]:
        """The dependent values of this plan, without the values inside inner plans."""
        outputs = (value for instruction in self.instructions for value in instruction.outputs)
        return dict.fromkeys([*self.starts, *outputs])
