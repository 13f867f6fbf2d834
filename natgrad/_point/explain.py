"""What was found in a model, in a form that people can read."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from natgrad import _text
from natgrad._point.rematerialised import RematerialisedUse
from natgrad._program.plan import Site
from natgrad._program.trace import Program
from natgrad._uses.base import Use
from natgrad._uses.parameter_uses import ParameterUses, kind


class SiteReport(NamedTuple):
    """One place where parameters meet the data.

    `bytes` is what is kept of it for a batch: the inputs recorded (unless another site has recorded them already) and
    the cotangents. It is zero where statistics are formed in the backward pass."""

    primitive: str
    rule: str
    parameters: tuple[str, ...]
    steps: tuple[int, ...]
    bytes: int


class ParameterReport(NamedTuple):
    """How the statistics of one parameter are computed: from its factors, from rows of a table, entry by entry (where
    gradients are no larger than the activations), or by forming its gradients (and then why)."""

    name: str
    shape: tuple[int, ...]
    num_uses: int
    statistics: str
    reason: str


class Explanation(NamedTuple):
    """The sites of a model and its parameters. Printed, two tables.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    gradients = ng.per_example(lambda w, x: x @ w, jnp.zeros(2), jnp.ones((3, 2)), jnp.ones(3))
    explanation = gradients.explain()
    assert len(explanation.sites) == len(explanation.parameters) == 1
    ```
    """

    sites: tuple[SiteReport, ...]
    parameters: tuple[ParameterReport, ...]

    def __str__(self) -> str:
        sites = [
            (s.primitive, s.rule, ", ".join(s.parameters), _loops(s.steps), _text.size(s.bytes)) for s in self.sites
        ]
        parameters = [(p.name, str(p.shape), str(p.num_uses), p.statistics, p.reason) for p in self.parameters]
        return "\n\n".join(
            [
                _text.table(("site", "rule", "parameters", "steps", "memory"), sites),
                _text.table(("parameter", "shape", "uses", "statistics", "because"), parameters),
            ]
        )


def explain(
    program: Program, parameters: Sequence[ParameterUses], formed: Sequence[RematerialisedUse], num_cotangents: int
) -> Explanation:
    in_backward = {use.site.number for use in formed}
    seen: set[Any] = set()
    sites = []
    for site in program.sites:
        new_values = [value for value in site.recorded if value not in seen]
        seen.update(new_values)
        numbers = sum(_numbers(program, value.loops, value.aval) for value in new_values)
        numbers += num_cotangents * sum(_numbers(program, site.loops, aval) for aval in site.avals)
        is_formed = site.number in in_backward
        steps = tuple(program.lengths[loop] for loop in site.loops)
        sites.append(
            SiteReport(site.primitive, _rules(site), _names(program, site), steps, 0 if is_formed else numbers)
        )
    formed_leaves = {use.leaf for use in formed}
    reports = [_parameter(program, parameter, parameter.leaf in formed_leaves) for parameter in parameters]
    return Explanation(tuple(sites), tuple(reports))


def _parameter(program: Program, parameter: ParameterUses, is_formed: bool) -> ParameterReport:
    if not parameter.uses:
        how, reason = "zero", "it is never used"
    elif not parameter.groups and parameter.acts_on_entries:
        how, reason = "entry by entry", ""
    elif not parameter.groups:
        how, reason = "gradients formed in chunks", parameter.reason
    elif any(group.lookups for group in parameter.groups):
        how, reason = "rows that are read", ""
    else:
        how, reason = "factors", ""
    if is_formed:
        how += ", in the backward pass"
    shape = tuple(program.param_structs[parameter.leaf].shape)
    return ParameterReport(program.names[parameter.leaf], shape, len(parameter.uses), how, reason)


def _numbers(program: Program, loops: tuple[int, ...], aval: Any) -> int:
    """Bytes of a value for the whole batch."""
    steps = math.prod(program.lengths[loop] for loop in loops)
    return program.num_examples * steps * math.prod(aval.shape) * aval.dtype.itemsize


def _rules(site: Site) -> str:
    return ", ".join(dict.fromkeys(kind(Use(site, operand)) for operand in site.meeting))


def _names(program: Program, site: Site) -> tuple[str, ...]:
    leaves = {leaf for operand in site.meeting for leaf in Use(site, operand).value.leaves}
    return tuple(program.names[leaf] for leaf in sorted(leaves))


def _loops(steps: tuple[int, ...]) -> str:
    return " × ".join(map(str, steps))
