"""A test of a model on its data, before anything is made of its per-example gradients: that it treats examples alike,
and that their sum is the gradient of the batch."""

import inspect
import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from natgrad import _tree
from natgrad._check import caller, is_concrete, require
from natgrad._model import WithoutAux, coupling_message, differing, finite
from natgrad._point.batch import Batch
from natgrad._point.point import OutputMap, Point
from natgrad._program.call import call_of, compare_programs
from natgrad._program.trace import Program, trace_example
from natgrad._types import Output, Scalar

# How far gradients may be apart, in roots of the machine epsilon: sums over examples in another order, and kinks that
# rounding puts an example on the other side of.
SLACK = 10.0
# The program runs once: without optimisation a network with four layers takes 1.6 s to probe instead of 3.2 s (JAX
# 0.10.1, CPU). Only time shows this, so that no test reproduces it.
UNOPTIMISED = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


class Findings(NamedTuple):
    """What a probe found: whether outputs are finite; which rows of them differ between the batch and the examples one
    by one; for every parameter, how far the two gradients are apart, and their size; and how far the derivative along a
    vector is from what the gradient says."""

    is_finite: Bool[Array, ""]
    are_coupled: Bool[Array, " N"]
    distances: list[Scalar]
    sizes: list[Scalar]
    along_vector: Scalar


def check_model(model: Callable, params: PyTree, batch: Batch) -> bool:
    """Refuse, where everything is concrete, a model that couples examples, or whose per-example gradients, summed with
    random weights for random cotangents, are not the gradient of the batch. Returns whether that is still to be
    checked, when the program runs.

    Done once for a model and shapes. Costs a gradient, and the time to compile it."""
    x = batch.x
    if not is_concrete((params, x)):
        return True
    described = jax.tree.structure((params, x)), batch.axes, *_tree.structure(jax.tree.leaves((params, x)))
    if _PASSED.has(model, described):
        return False
    program = trace_example(model, params, x, batch.in_axes)
    if not program.is_concrete:
        return True
    probe(model, program, params, x)
    _PASSED.add(model, described)
    return False


def probe(model: Callable, program: Program, params: PyTree, x: PyTree, *, needs_finite: bool = True) -> None:
    """Compare the gradients of examples with that of the batch, and refuse a model for which they differ."""
    random = np.random.default_rng(0)

    def like(struct):
        return random.normal(size=struct.shape).astype(struct.dtype)

    cotangents, vector = (jax.tree.map(like, tree) for tree in (program.outputs, program.params))
    # Neither of them may hide a row: weights are of one size.
    weights = random.choice([-1.0, 1.0], program.num_examples)
    function = jax.jit(lambda *arguments: _probe(model, program, *arguments), compiler_options=UNOPTIMISED)
    with jax.ensure_compile_time_eval():
        findings = jax.tree.map(np.asarray, function(params, x, cotangents, weights, vector))
    if needs_finite and not findings.is_finite:
        z = OutputMap(model, Batch(x))(params)
        require(z, [finite(z)], f"{caller()}: the output of the model")
    _judge(findings, program)


def _probe(
    model: Callable, program: Program, params: PyTree, x: PyTree, u: Output, weights: Array, v: PyTree
) -> Findings:
    of_batch = OutputMap(model, Batch(x))
    z, pull = jax.vjp(lambda params: of_batch(params), params)

    def weigh(u):
        return u * weights.reshape(-1, *(1,) * (u.ndim - 1)).astype(u.dtype)

    weighed = jax.tree.map(weigh, u)
    (gradient,) = pull(weighed)
    point = of_batch.traced(params, program)
    summed = point.per_example(u, is_stacked=False).rmatvec(weights)
    pairs = list(zip(jax.tree.leaves(gradient), jax.tree.leaves(summed), strict=True))
    return Findings(
        finite(z).holds,
        differing(z, point.z),
        [_norm(a - b.astype(a.dtype)) for a, b in pairs],
        [_norm(a) for a, _ in pairs],
        jnp.abs(_product(point.tangent_of_params, weighed, v) - _tree.vdot(gradient, v)),
    )


def _product(push: Callable, cotangents: Output, v: PyTree) -> Scalar:
    r"""$u^\top J v$, by transposing twice, which needs no rule for forward mode. Models that can be differentiated in
    reverse mode only, such as loops with checkpoints, are transposed once."""
    back = jax.linear_transpose(push, v)
    try:
        (pushed,) = jax.linear_transpose(lambda u: back(u)[0], cotangents)(v)
    except Exception:
        return _tree.vdot(back(cotangents)[0], v)
    return _tree.vdot(cotangents, pushed)


def _norm(x: Array) -> Scalar:
    wide = _tree.at_least_float32(x)
    # Squares of very small and of very large numbers would not be numbers.
    largest = jnp.max(jnp.abs(wide), initial=0.0)
    scale = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1.0)
    return scale * jnp.sqrt(jnp.sum((wide / scale) ** 2))


def _judge(findings: Findings, program: Program) -> None:
    if findings.are_coupled.any():
        raise ValueError(coupling_message(program.coupling, np.flatnonzero(findings.are_coupled)))
    epsilons = [jnp.finfo(leaf.dtype).eps for leaf in jax.tree.leaves((program.outputs, program.params))]
    slack = SLACK * float(max(epsilons)) ** 0.5
    total = math.hypot(*map(float, findings.sizes))
    gaps = zip(program.names, findings.distances, findings.sizes, strict=False)
    wrong = [(name, float(gap), float(size)) for name, gap, size in gaps if gap > slack * (size + slack * total)]
    if findings.along_vector > slack * total:
        wrong.append(("a random direction", float(findings.along_vector), total))
    if wrong:
        name, gap, size = wrong[0]
        raise ValueError(
            f"{caller()}: the per-example gradients of this model do not add up to the gradient of its batch: for "
            f"`{name}` they are off by {gap:.2g}, where the gradient has size {size:.2g}. Either a "
            "derivative rule in the model (`jax.custom_vjp`, `jax.custom_jvp`) couples examples or depends on the "
            "batch size, or this is an error in natgrad: please report it with the model. `check=False` turns this "
            "test off."
        )


def check_independent(point: Point) -> bool:
    """Refuse a model that couples examples: read off its program, or else by running every example alone. Returns
    whether that could be found out, because everything is concrete."""
    model, params, x = point.map.model, point.params, point.map.batch.x
    if not is_concrete((params, x, point.z)):
        return False
    call = call_of(model, params, x, point.map.batch.in_axes)
    _, coupling = compare_programs(call, point.num_examples)
    if not coupling:
        return True
    shared, data = call.split(jax.tree.leaves(x))

    def of_example(data: list[Any]) -> Output:
        return jax.tree.map(lambda z: z[0], call.of_one(jax.tree.leaves(params), shared, data))

    with jax.ensure_compile_time_eval():
        alone = jax.jit(jax.vmap(of_example, in_axes=([axis for _, axis in data],)))([leaf for leaf, _ in data])
        are_coupled = differing(point.z, alone)
    if not is_concrete(are_coupled):
        return False
    if np.any(are_coupled):
        raise ValueError(coupling_message(coupling, np.flatnonzero(are_coupled)))
    return True


def may_couple(point: Point) -> bool:
    """Whether the program of a model does not show that it treats examples independently."""
    if point.sites is not None:
        return bool(point.program.coupling)
    try:
        batch = point.map.batch
        call = call_of(point.map.model, point.params, batch.x, batch.in_axes)
        _, coupling = compare_programs(call, point.num_examples)
    except ValueError:
        return True
    return bool(coupling)


class _Passed:
    """Which models have passed, and for which shapes. A model is forgotten when it is deleted."""

    def __init__(self):
        self._shapes: dict[int, tuple[weakref.ref, set]] = {}

    def has(self, model: Callable, described: Any) -> bool:
        owner, method = _identity(model)
        known, shapes = self._shapes.get(id(owner), (None, ()))
        return known is not None and known() is owner and (method, *described) in shapes

    def add(self, model: Callable, described: Any) -> None:
        owner, method = _identity(model)
        key = id(owner)
        try:
            reference = weakref.ref(owner, lambda _: self._shapes.pop(key, None))
        except TypeError:
            return
        self._shapes.setdefault(key, (reference, set()))[1].add((method, *described))


def _identity(model: Any) -> tuple[Any, Any]:
    """The object that stays the same from call to call, and its method if that is what is called."""
    if isinstance(model, WithoutAux):
        owner, method = _identity(model.model)
        return owner, (method, "has_aux")
    if isinstance(model, jax.tree_util.Partial) and not model.args and not model.keywords:
        return _identity(model.func)
    return (model.__self__, model.__func__) if inspect.ismethod(model) else (model, None)


_PASSED = _Passed()
