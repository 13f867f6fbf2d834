"""Statistics formed inside the backward pass, for parameters used under `jax.checkpoint`.

Rematerialisation forgets the inputs of every block after the forward pass. Recording them for later would give up what
it saves, so at such a site the statistic is formed in the moment the backward pass goes through it, where the input is
there for a while. The trick: the site takes one more operand, a zero that it ignores, and says that the cotangent of
this operand is the statistic. The zeros of a scan's layers are scanned over, so the statistics of all layers arrive
stacked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from natgrad._point.records import MemoryBudget, SiteRecords
from natgrad._program.plan import Site
from natgrad._program.trace import Program, add_taps, visited
from natgrad._program.values import Constant, Dependent, Free, Leaf, Result, Slice, results
from natgrad._uses.base import Use
from natgrad._uses.copies import EntryCopy, copy_of, leaf_of, source
from natgrad._uses.parameter_uses import ParameterUses, find_uses

# From a recording of one site at one step, its route and the budget, to what is added up over sites.
Statistic = Callable[[SiteRecords, ParameterUses, MemoryBudget], jax.Array]


@dataclass(frozen=True, eq=False)
class RematerialisedUse:
    """A parameter whose statistics are formed in the backward pass, at its one site.

    `alone` is the site as it is at one step of its loops, and `route` leads from it to `root`, what that step sees of
    the parameter. `copy` leads on to the parameter."""

    leaf: int
    site: Site
    alone: Site
    parameter: ParameterUses
    root: Free
    copy: EntryCopy


def formed_in_backward(parameter: ParameterUses, lengths: dict[int, int]) -> RematerialisedUse | None:
    """A parameter as one whose statistics are formed in the backward pass: for a single use under `jax.checkpoint`, in
    loops whose every step has its own part of the parameter. `None` for other parameters.

    Branches that examples choose are left out: `jax.vmap` gives each example a copy of what its branch reads, and the
    statistic of a batch is not the cotangent of any copy."""
    if len(parameter.uses) != 1:
        return None
    (use,) = parameter.uses
    if not use.site.is_rematerialised or use.site.is_optional or use.loop_axes[1]:
        return None
    origin = leaf_of(use.value, parameter.leaf)
    root = _root(use.value, parameter.leaf, use.site.loops)
    copy = copy_of(root, origin, lengths) if root is not None and origin is not None else None
    is_met = any(isinstance(operand, Dependent) for operand in use.site.operands)
    if root is None or copy is None or copy.is_scaled or copy.is_mixed or not copy.is_plain:
        return None
    if not is_met or len(use.site.meeting) > 1 or use.site.asks_what_is_perturbed:
        return None
    leaf = Leaf(root.aval, frozenset([0]), (), 0)
    value = _at_step(use.value, root, leaf)
    inner = copy_of(value, leaf, {}) if value is not None else None
    if value is None or inner is None or inner.is_scaled:
        return None
    alone = _alone(use, value)
    return RematerialisedUse(parameter.leaf, use.site, alone, find_uses([Use(alone, use.operand)], 0, {}), root, copy)


def form(formed: RematerialisedUse, statistic: Statistic, budget: MemoryBudget) -> Callable:
    """The equation of a site with two more operands in front: one whose cotangent is the statistic, and one that
    differs between examples even if the others do not, so that the batch is always seen."""
    site = formed.alone
    is_mapped = [isinstance(value, Dependent) for value in site.operands]
    is_needed = [value in site.recorded or not isinstance(value, Dependent) for value in site.operands]
    equation = jax.vmap(
        lambda *operands: tuple(site.compute(list(operands))), in_axes=[0 if mapped else None for mapped in is_mapped]
    )

    @jax.custom_vjp
    def batched(zero, *operands):
        del zero
        return equation(*operands)

    def forward(zero, *operands):
        # What the derivative does not need is replaced by a number, so that `jax.checkpoint` saves its memory.
        kept = tuple(x if needed else jnp.zeros((), x.dtype) for x, needed in zip(operands, is_needed, strict=True))
        return batched(zero, *operands), (zero, kept)

    def backward(residuals, cotangents):
        zero, kept = residuals
        count = cotangents[site.results[0]].shape[0]
        operands = [
            x if needed else jnp.zeros((count, *value.aval.shape), x.dtype)
            for x, value, needed in zip(kept, site.operands, is_needed, strict=True)
        ]
        _, pull = jax.vjp(equation, *operands)
        recording = SiteRecords(
            [jnp.zeros(formed.root.aval.shape, formed.root.aval.dtype)],
            {v: x for v, x in zip(site.operands, operands, strict=True) if isinstance(v, Free)},
            {v: x for v, x in zip(site.operands, operands, strict=True) if isinstance(v, Dependent)},
            {site.number: [cotangents[k][:, None] for k in site.results]},
            {},
        )
        return statistic(recording, formed.parameter, budget).astype(zero.dtype), *pull(cotangents)

    batched.defvjp(forward, backward)

    @jax.custom_batching.custom_vmap
    def of_example(zero, example, *operands):
        del zero, example
        return tuple(site.compute(list(operands)))

    @of_example.def_vmap
    def _(axis_size, is_batched, zero, example, *operands):
        del example
        repeat = lambda x: jnp.broadcast_to(x, (axis_size, *jnp.shape(x)))
        operands = [
            repeat(x) if mapped and not already else x
            for x, mapped, already in zip(operands, is_mapped, is_batched[2:], strict=True)
        ]
        out = batched(zero, *operands)
        return out, tuple(True for _ in out)

    return of_example


def _root(value: Free, leaf: int, loops: tuple[int, ...]) -> Free | None:
    """What one step of the loops sees of a parameter."""
    while not (isinstance(value, Leaf | Slice) and value.loops == loops):
        if isinstance(value, Slice):
            value = value.whole
            continue
        if not isinstance(value, Result):
            return None
        place = source(value, frozenset([leaf]))
        if place is None:
            return None
        value = value.operands[place]
    return value


def _at_step(value: Free, root: Free, leaf: Leaf) -> Free | None:
    """An expression of the root as one of a parameter outside of any loop; `None` if it needs anything else."""
    if value is root:
        return leaf
    if isinstance(value, Constant):
        return value
    if not isinstance(value, Result):
        return None
    operands = [_at_step(operand, root, leaf) for operand in value.operands]
    if any(operand is None for operand in operands):
        return None
    return results(value.eqn, operands)[value.position]  # pyright: ignore


def _alone(use: Use, value: Free) -> Site:
    """The site at one step of its loops."""
    site = use.site

    def at_step(position: int):
        operand = site.operands[position]
        if position == use.operand:
            return value
        if isinstance(operand, Dependent):
            return Dependent(operand.aval, ())
        return Free(operand.aval, frozenset(), ())

    operands = tuple(at_step(position) for position in range(len(site.operands)))
    return replace(site, operands=operands, loops=())


def form_all(
    program: Program,
    formed: Sequence[RematerialisedUse],
    leaves: list[Any],
    x: PyTree,
    cotangents: list[Any],
    statistic: Statistic,
    budget: MemoryBudget,
) -> tuple[SiteRecords, list[tuple[RematerialisedUse, Any]]]:
    """A forward and a backward pass that forms the statistic at some sites, with the axes of their loops in front, and
    records the others."""
    by_site = {use.site.number: use for use in formed}
    equations = {number: form(use, statistic, budget) for number, use in by_site.items()}

    def probe(site, operands, given):
        if site.number in equations:
            return equations[site.number](*given, *operands)
        return add_taps(site, operands, given)

    others = [site for site in program.sites if site.number not in by_site]
    inputs: dict[int, Any] = {site.number: program.zeros(site) for site in others}
    mapped: dict[int, Any] = dict.fromkeys(inputs, 0)
    for number, use in by_site.items():
        loops = tuple(program.lengths[loop] for loop in use.site.loops)
        shape = _shape(use, statistic, budget, program.num_examples)
        # The statistic is the sum over examples, hence one zero for all of them; the second makes the site see the
        # batch.
        inputs[number] = (jnp.zeros((*loops, *shape.shape), shape.dtype), jnp.zeros((program.num_examples, *loops)))
        mapped[number] = (None, 0)
    run = visited(program, leaves, x, inputs, mapped, probe, others)
    pulled = run.pull(cotangents)
    at_others = {site.number: [h[:, None] for h in pulled[site.number]] for site in others}
    recording = SiteRecords(leaves, program.free_values(leaves), run.records, at_others, program.lengths)
    return recording, [(use, pulled[number][0]) for number, use in by_site.items()]


def _shape(formed: RematerialisedUse, statistic: Statistic, budget: MemoryBudget, count: int) -> Any:
    """The shape and dtype of a statistic at one site and one step."""
    site, root = formed.alone, formed.root.aval

    def struct(aval, *lead):
        return jax.ShapeDtypeStruct((*lead, *aval.shape), aval.dtype)

    free = [v for v in site.operands if isinstance(v, Free)]
    dependent = [v for v in site.operands if isinstance(v, Dependent)]

    def of(leaf, free_values, records, cotangents):
        named = dict(zip(free, free_values, strict=True))
        at = dict(zip(dependent, records, strict=True))
        return statistic(SiteRecords([leaf], named, at, {site.number: cotangents}, {}), formed.parameter, budget)

    return jax.eval_shape(
        of,
        struct(root),
        [struct(v.aval) for v in free],
        [struct(v.aval, count) for v in dependent],
        [struct(aval, count, 1) for aval in site.avals],
    )
