"""The program of one example as steps that can be run with a probe at every site.

A plan computes the dependent values, given the free ones. What happens at a site is left to the caller: to compute its
results and add a tap to them, or to do more."""

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
    """An equation in which a free value that carries a gradient meets the data (`eqn` is `None` where a free value is
    simply used as one that depends on the example).

    `results` are the positions of its floating-point results, whose cotangents are asked for."""

    number: int
    eqn: compat.Equation | None
    operands: tuple[Value, ...]
    results: tuple[int, ...]
    avals: tuple[Any, ...]
    loops: tuple[int, ...]
    is_rematerialised: bool

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
        return () if self.primitive in ("add", "sub", "add_any") else dependent


# What is passed in for each site, by its number.
Inputs = dict[int, Any]


class Visit(NamedTuple):
    """What to do at each site, given its operands and what was passed in for it, and which values to record."""

    probe: Callable[[Site, list[Any], Any], list[Any]]
    wanted: frozenset[Dependent]


class Instruction:
    """One step of a plan: operands to outputs, with records of what was asked for."""

    operands: tuple[Value, ...]
    outputs: tuple[Dependent, ...]

    @abstractmethod
    def run(self, env: Environment, inputs: Inputs, visit: Visit) -> tuple[list[Any], list[Any]]: ...

    def inner(self) -> tuple["Plan", ...]:
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
    """A site."""

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
    """A free value without a gradient, used as one that depends on the example."""

    operands: tuple[Value, ...]
    outputs: tuple[Dependent, ...]

    def run(self, env, inputs, visit):
        return [jnp.asarray(env[self.operands[0]])], []


@dataclass(eq=False)
class Plan:
    """Steps, the dependent values they start from, and those they are run for."""

    loops: tuple[int, ...]
    starts: tuple[Dependent, ...] = ()
    steps: list[Instruction] = field(default_factory=list)
    ends: tuple[Value, ...] = ()

    def run(self, env: Environment, inputs: Inputs, visit: Visit) -> tuple[list[Any], list[Any]]:
        """The values of `ends` and the records, for an environment with the free values and `starts`."""
        env, records = dict(env), []
        for step in self.steps:
            outputs, inner = step.run(env, inputs, visit)
            env.update(zip(step.outputs, outputs, strict=True))
            records += inner
        records += [env[value] for value in self._defined() if value in visit.wanted]
        return [env[value] for value in self.ends], records

    def sites(self) -> Iterator[Site]:
        for step in self.steps:
            if isinstance(step, SiteEquation):
                yield step.site
            for plan in step.inner():
                yield from plan.sites()

    def asks_what_is_perturbed(self) -> bool:
        """Whether the derivative of some step depends on which of its operands are differentiated."""
        return any(
            step.asks_what_is_perturbed() or any(plan.asks_what_is_perturbed() for plan in step.inner())
            for step in self.steps
        )

    def free(self) -> Iterator[Free]:
        """Every free value that has to be known to run the plan; some more than once."""
        for step in self.steps:
            yield from (value for value in step.operands if isinstance(value, Free))
            for plan in step.inner():
                yield from plan.free()
        yield from (value for value in self.ends if isinstance(value, Free))

    def own(self, inputs: Inputs) -> Inputs:
        """The inputs of the sites in this plan."""
        return {site.number: inputs[site.number] for site in self.sites()}

    def recorded(self, wanted: frozenset[Dependent]) -> Iterator[Dependent]:
        """The values that a run records, in the order of its records."""
        for step in self.steps:
            for plan in step.inner():
                yield from plan.recorded(wanted)
        yield from (value for value in self._defined() if value in wanted)

    def _defined(self) -> dict[Dependent, None]:
        """The dependent values that this plan has before or after its steps, not those inside of them."""
        return dict.fromkeys([*self.starts, *(value for step in self.steps for value in step.outputs)])
