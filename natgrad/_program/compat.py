"""Everything that may change with the JAX version: names of primitives and of their parameters.

Each reader takes an equation of a jaxpr and returns its parts, or `None` for an equation of another kind. Primitives
are recognised by name; an unknown one is evaluated and differentiated as it stands. The only other file that reads the
parameters of equations is `slices`."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.core
import numpy as np
from jax.extend import core

# An equation of a jaxpr. `Any`, because JAX exports no type with its fields.
Equation: TypeAlias = Any
# Results with the entries of the operand in their places, perhaps in another dtype.
IDENTITIES = {"convert_element_type", "reduce_precision", "copy", "copy_p", "device_put", "sharding_constraint", "name"}
# Results with entries of the operand in other places, none of them repeated.
REARRANGEMENTS = {"reshape", "transpose", "squeeze", "expand_dims", "slice", "rev", "split"}
# Results in which entries of an operand may be repeated, or stand beside others.
PLACEMENTS = {"broadcast_in_dim", "dynamic_slice", "gather", "concatenate", "pad"}
SUMS = {"add", "add_any"}
SUMS_AND_DIFFERENCES = SUMS | {"sub"}
# Every entry of the result is an entry of an operand, or a sum of such entries.
COPYING = IDENTITIES | REARRANGEMENTS | PLACEMENTS | SUMS_AND_DIFFERENCES
CALLS = {"jit", "pjit", "closed_call", "core_call"}
CUSTOM = {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
REMATERIALISED = {"checkpoint", "remat", "remat2"}


class ClosedJaxpr(NamedTuple):
    """A jaxpr and the constants that it has captured."""

    jaxpr: Any
    constants: tuple[Any, ...]


class ScanParts(NamedTuple):
    """A scan. Its body maps (constants, carried values, slices) to (carried values, stacked results)."""

    body: ClosedJaxpr
    num_constants: int
    num_carried: int
    length: int
    reverse: bool
    unroll: Any


class WhileParts(NamedTuple):
    """A `while` loop. Its condition and its body each take constants, then the carried values."""

    condition: ClosedJaxpr
    body: ClosedJaxpr
    num_condition_constants: int
    num_body_constants: int


class DotParts(NamedTuple):
    """The axes of both operands of a `dot_general` that are contracted, and those that are mapped."""

    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    mapped: tuple[tuple[int, ...], tuple[int, ...]]

    def free(self, operand: int, rank: int) -> tuple[int, ...]:
        """The axes of an operand that are neither contracted nor mapped."""
        taken = self.contracted[operand] + self.mapped[operand]
        return tuple(axis for axis in range(rank) if axis not in taken)


class ConvolutionParts(NamedTuple):
    """A convolution. Axes are in the order (images, features, space...), for the kernel (outputs, inputs, space...)."""

    input_axes: tuple[int, ...]
    kernel_axes: tuple[int, ...]
    output_axes: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    input_dilation: tuple[int, ...]
    kernel_dilation: tuple[int, ...]
    feature_groups: int
    batch_groups: int


class LookupParts(NamedTuple):
    """An equation that reads whole rows of a table.

    - `row_axes`: the axes of the result that run along a row.
    - `component`: which component of an index is the number of the row; `None` if the index is that number.
    - `drops_outside`: whether an index outside the table reads no row, instead of the nearest row."""

    row_axes: tuple[int, ...]
    component: int | None
    drops_outside: bool


def name(eqn: Equation) -> str:
    return eqn.primitive.name


def is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal)


def asks_what_is_perturbed(eqn: Equation) -> bool:
    """Whether the derivative of an equation may depend on which of its operands are differentiated.

    It may for custom derivatives with symbolic zeros, and for primitives that are not JAX's own."""
    if bool(eqn.params.get("symbolic_zeros")) if name(eqn) in CUSTOM else name(eqn) not in _jax_primitives():
        return True
    return any(asks_what_is_perturbed(inner) for jaxpr in _inner_jaxprs(eqn) for inner in jaxpr.eqns)


@functools.cache
def _jax_primitives() -> frozenset[str]:
    """The primitives of JAX, whose derivatives do not depend on what else is differentiated."""
    public = (value for module in (jax.lax, jax.lax.linalg) for value in vars(module).values())
    return frozenset({p.name for p in public if isinstance(p, core.Primitive)} | COPYING | CALLS | REMATERIALISED)


def uses(jaxpr: Any, primitive: str) -> bool:
    """Whether a program, or a program inside it, uses a primitive (`custom_lin` stands for a `jax.custom_vjp`)."""
    return any(
        name(eqn) == primitive or any(uses(inner, primitive) for inner in _inner_jaxprs(eqn)) for eqn in jaxpr.eqns
    )


def _inner_jaxprs(eqn: Equation) -> list[Any]:
    """The jaxprs among the parameters of an equation."""
    candidates = (getattr(param, "jaxpr", param) for param in jax.tree.leaves(list(eqn.params.values())))
    return [candidate for candidate in candidates if hasattr(candidate, "eqns")]


def closed_jaxpr(jaxpr: Any) -> ClosedJaxpr:
    """A jaxpr with its constants, which JAX keeps in a `ClosedJaxpr` around it, or since 0.12 in the jaxpr itself."""
    return ClosedJaxpr(getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ())))


def call(eqn: Equation) -> ClosedJaxpr | None:
    """The program of a plain call, which may be inlined."""
    if name(eqn) not in CALLS:
        return None
    return closed_jaxpr(eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"])


def any_call(eqn: Equation) -> ClosedJaxpr | None:
    """The program of a plain call, of a function with custom derivatives, or of a `jax.checkpoint`."""
    if name(eqn) in CUSTOM:
        return closed_jaxpr(eqn.params["call_jaxpr"] if "call_jaxpr" in eqn.params else eqn.params["fun_jaxpr"])
    return closed_jaxpr(eqn.params["jaxpr"]) if name(eqn) in REMATERIALISED else call(eqn)


def while_loop(eqn: Equation) -> WhileParts | None:
    if name(eqn) != "while":
        return None
    p = eqn.params
    return WhileParts(
        closed_jaxpr(p["cond_jaxpr"]), closed_jaxpr(p["body_jaxpr"]), p["cond_nconsts"], p["body_nconsts"]
    )


def rematerialised(eqn: Equation) -> tuple[ClosedJaxpr, dict] | None:
    """The program inside a `jax.checkpoint`, and its options."""
    if name(eqn) not in REMATERIALISED:
        return None
    return closed_jaxpr(eqn.params["jaxpr"]), {key: eqn.params[key] for key in ("policy", "prevent_cse")}


def branches(eqn: Equation) -> list[ClosedJaxpr] | None:
    return [closed_jaxpr(branch) for branch in eqn.params["branches"]] if name(eqn) == "cond" else None


def scan(eqn: Equation) -> ScanParts | None:
    if name(eqn) != "scan":
        return None
    p = eqn.params
    if "ft_in" in p:  # JAX 0.12
        num_constants, num_carried, _ = map(len, p["ft_in"].unpack())
    else:
        num_constants, num_carried = p["num_consts"], p["num_carry"]
    return ScanParts(
        closed_jaxpr(p["jaxpr"]), num_constants, num_carried, p["length"], p["reverse"], p.get("unroll", 1)
    )


def dot(eqn: Equation) -> DotParts | None:
    if name(eqn) != "dot_general":
        return None
    contracted, mapped = eqn.params["dimension_numbers"]
    return DotParts(*(tuple(map(tuple, pair)) for pair in (contracted, mapped)))  # pyright: ignore[reportArgumentType]


def convolution(eqn: Equation) -> ConvolutionParts | None:
    if name(eqn) != "conv_general_dilated":
        return None
    p, axes = eqn.params, eqn.params["dimension_numbers"]
    return ConvolutionParts(
        axes.lhs_spec,
        axes.rhs_spec,
        axes.out_spec,
        tuple(p["window_strides"]),
        tuple(p["padding"]),
        tuple(p["lhs_dilation"]),
        tuple(p["rhs_dilation"]),
        p["feature_group_count"],
        p["batch_group_count"],
    )


def lookup(eqn: Equation) -> LookupParts | None:
    """The parts of a `gather` or `dynamic_slice` that reads whole rows of its first operand."""
    table = eqn.invars[0].aval.shape if eqn.invars else ()
    if name(eqn) == "dynamic_slice" and len(table) > 0 and tuple(eqn.params["slice_sizes"]) == (1, *table[1:]):
        return LookupParts(tuple(range(1, len(table))), None, drops_outside=False)
    if name(eqn) != "gather":
        return None
    p, axes = eqn.params, eqn.params["dimension_numbers"]
    reads_rows = tuple(p["slice_sizes"]) == (1, *table[1:]) and 0 in axes.start_index_map
    # Further components of an index have no effect: a whole row fits its axes at index zero only, and JAX clips to it.
    collapsed = tuple(axes.collapsed_slice_dims)
    if not reads_rows or axes.operand_batching_dims or collapsed not in ((0,), ()):
        return None
    drops_outside = p["mode"].name == "FILL_OR_DROP"
    if drops_outside and len(axes.start_index_map) > 1:
        return None
    offset = tuple(axes.offset_dims)
    row_axes = offset if collapsed == (0,) else offset[1:]
    return LookupParts(row_axes, list(axes.start_index_map).index(0), drops_outside)


def _broadcast_in_dim(x: np.ndarray, *, shape: tuple, broadcast_dimensions: tuple, **_: Any) -> np.ndarray:
    spread = [1] * len(shape)
    for axis, size in zip(broadcast_dimensions, x.shape, strict=True):
        spread[axis] = size
    return np.broadcast_to(x.reshape(spread), shape)


# Rearrangements that NumPy can do, with the parameters of the equation as arguments.
BY_NUMPY: dict[str, Callable[..., np.ndarray]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": lambda x, *, new_sizes, **_: x.reshape(new_sizes),
    "squeeze": lambda x, *, dimensions, **_: np.squeeze(x, dimensions),
    "transpose": lambda x, *, permutation, **_: x.transpose(permutation),
}


def rearrange(eqn: Equation, x: Any) -> Any:
    """The result of an equation that moves the entries of its only operand.

    NumPy arrays go through NumPy, because outside `jit` JAX compiles a program for each shape (JAX 0.10.1). Reproduced
    by `test_every_shape_outside_jit_is_compiled`."""
    if isinstance(x, np.ndarray) and name(eqn) in BY_NUMPY:
        return BY_NUMPY[name(eqn)](x, **eqn.params)
    return evaluate(eqn, [x])[0]


def evaluate(eqn: Equation, operands: list[Any]) -> list[Any]:
    """The results of an equation for the given operands.

    Two operands may differ even where the equation repeats a variable. Dtypes may differ from those in the equation:
    `EntryCopy.index_map` sends integers through equations for floating-point numbers."""
    slots = [k for k, atom in enumerate(eqn.invars) if not _is_literal_like(atom, operands[k])]
    atoms = [eqn.invars[k] for k in slots]
    if any(map(is_literal, atoms)) or len(set(atoms)) < len(atoms):
        atoms = [core.Var(atom.aval) for atom in atoms]
        variables = dict(zip(slots, atoms, strict=True))
        eqn = eqn.replace(invars=[variables.get(k, atom) for k, atom in enumerate(eqn.invars)])
    jaxpr: Any = core.Jaxpr([], atoms, list(eqn.outvars), [eqn], eqn.effects, _debug_info())
    return jax.core.eval_jaxpr(jaxpr, [], *(operands[k] for k in slots))


def _is_literal_like(atom: Any, operand: Any) -> bool:
    """Whether an operand is a literal of the equation, in the dtype of what is to take its place."""
    return is_literal(atom) and getattr(operand, "dtype", atom.aval.dtype) == atom.aval.dtype


@functools.cache
def _debug_info() -> Any:
    """The debug information of an empty program: a jaxpr needs some, and JAX exports no constructor for it."""
    return jax.make_jaxpr(lambda: ())().jaxpr.debug_info
