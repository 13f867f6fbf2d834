"""What natgrad knows of jaxprs: names of primitives and of their parameters, which JAX does not promise to keep.

Only `slices` reads the parameters of equations besides. Primitives are recognised by name; one that is not known here
is evaluated and differentiated as it stands."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.core
import numpy as np
from jax.extend import core

# An equation of a jaxpr, of which this file knows what the types do not say.
Equation: TypeAlias = Any
# Equations that move entries, copy them or add to them.
SAME = {"convert_element_type", "reduce_precision", "copy", "copy_p", "device_put", "sharding_constraint", "name"}
MOVED = {"reshape", "transpose", "squeeze", "expand_dims", "slice", "rev", "split"}
PLACED = {"broadcast_in_dim", "dynamic_slice", "gather", "concatenate", "pad"}
SHIFTED = {"add", "sub", "add_any"}
COPYING = SAME | MOVED | PLACED | SHIFTED
CALLS = {"jit", "pjit", "closed_call", "core_call"}
CUSTOM = {"custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"}
REMATERIALISED = {"checkpoint", "remat", "remat2"}


class ClosedJaxpr(NamedTuple):
    """A jaxpr, and the constants it has captured."""

    jaxpr: Any
    constants: tuple[Any, ...]


class ScanParts(NamedTuple):
    """A scan: its body takes and returns the carried values first, after the constants it is given."""

    body: ClosedJaxpr
    num_constants: int
    num_carried: int
    length: int
    reverse: bool
    unroll: Any


class WhileParts(NamedTuple):
    """A loop whose condition and body take the carried values after the constants they are given."""

    condition: ClosedJaxpr
    body: ClosedJaxpr
    num_condition_constants: int
    num_body_constants: int


class DotParts(NamedTuple):
    """Which axes of each operand of a `dot_general` are contracted and which are mapped."""

    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    mapped: tuple[tuple[int, ...], tuple[int, ...]]

    def free(self, operand: int, rank: int) -> tuple[int, ...]:
        taken = self.contracted[operand] + self.mapped[operand]
        return tuple(axis for axis in range(rank) if axis not in taken)


class ConvolutionParts(NamedTuple):
    """A convolution. Each specification gives the axes of (batch or outputs, features, space...)."""

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
    """A table whose rows are read: the axes of the output that run along a row, where in an index the row stands
    (`None`: the index is the row), and whether a row outside the table reads as nothing instead of the nearest one."""

    row_axes: tuple[int, ...]
    component: int | None
    drops_outside: bool


def name(eqn: Equation) -> str:
    return eqn.primitive.name


def is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal)


def asks_what_is_perturbed(eqn: Equation) -> bool:
    """Whether the derivative of an equation may depend on which of its operands are differentiated: rules with
    symbolic zeros, and primitives that are not JAX's own."""
    if bool(eqn.params.get("symbolic_zeros")) if name(eqn) in CUSTOM else name(eqn) not in _primitives():
        return True
    return any(asks_what_is_perturbed(inner) for jaxpr in _inner(eqn) for inner in jaxpr.eqns)


@functools.cache
def _primitives() -> frozenset[str]:
    """The primitives of JAX that know nothing of what is perturbed."""
    public = (value for module in (jax.lax, jax.lax.linalg) for value in vars(module).values())
    return frozenset({p.name for p in public if isinstance(p, core.Primitive)} | COPYING | CALLS | REMATERIALISED)


def uses(jaxpr: Any, primitive: str) -> bool:
    """Whether a program, or a program inside it, uses a primitive (`custom_lin` stands for a `jax.custom_vjp`)."""
    return any(name(eqn) == primitive or any(uses(inner, primitive) for inner in _inner(eqn)) for eqn in jaxpr.eqns)


def _inner(eqn: Equation) -> list[Any]:
    """The programs that an equation runs."""
    parts = (getattr(p, "jaxpr", p) for p in jax.tree.leaves(list(eqn.params.values())))
    return [part for part in parts if hasattr(part, "eqns")]


def closed_jaxpr(jaxpr: Any) -> ClosedJaxpr:
    """A jaxpr with its constants, whether they are kept beside it or in it (JAX 0.12)."""
    return ClosedJaxpr(getattr(jaxpr, "jaxpr", jaxpr), tuple(getattr(jaxpr, "consts", ())))


def call(eqn: Equation) -> ClosedJaxpr | None:
    """The program of a plain call, which may be inlined; `None` for other equations."""
    if name(eqn) not in CALLS:
        return None
    return closed_jaxpr(eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"])


def called(eqn: Equation) -> ClosedJaxpr | None:
    """The program of a call of any kind, also with derivatives of its own or rematerialised."""
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
    """The parts of an equation that reads whole rows of its first operand."""
    table = eqn.invars[0].aval.shape if eqn.invars else ()
    if name(eqn) == "dynamic_slice" and len(table) > 0 and tuple(eqn.params["slice_sizes"]) == (1, *table[1:]):
        return LookupParts(tuple(range(1, len(table))), None, drops_outside=False)
    if name(eqn) != "gather":
        return None
    p, axes = eqn.params, eqn.params["dimension_numbers"]
    reads_rows = tuple(p["slice_sizes"]) == (1, *table[1:]) and 0 in axes.start_index_map
    # An index into another axis than the first cannot shift a whole row: it is taken to the nearest that fits, zero.
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


BY_NUMPY: dict[str, Callable[..., np.ndarray]] = {
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": lambda x, *, new_sizes, **_: x.reshape(new_sizes),
    "squeeze": lambda x, *, dimensions, **_: np.squeeze(x, dimensions),
    "transpose": lambda x, *, permutation, **_: x.transpose(permutation),
}


def moved(eqn: Equation, x: Any) -> Any:
    """The result of an equation that moves the entries of its one operand. Those of NumPy arrays are moved by NumPy,
    which compiles nothing."""
    if isinstance(x, np.ndarray) and name(eqn) in BY_NUMPY:
        return BY_NUMPY[name(eqn)](x, **eqn.params)
    return evaluate(eqn, [x])[0]


def evaluate(eqn: Equation, operands: list[Any]) -> list[Any]:
    """The results of an equation for given operands, one for each slot even where a variable is repeated.

    The dtypes need not be those of the equation, so that integers can be sent where numbers would go."""
    same = lambda index, atom: getattr(operands[index], "dtype", atom.aval.dtype) == atom.aval.dtype
    is_kept = lambda index, atom: is_literal(atom) and same(index, atom)
    slots = [index for index, atom in enumerate(eqn.invars) if not is_kept(index, atom)]
    atoms = [eqn.invars[index] for index in slots]
    if any(map(is_literal, atoms)) or len(set(atoms)) < len(atoms):
        atoms = [core.Var(atom.aval) for atom in atoms]
        fresh = dict(zip(slots, atoms, strict=True))
        eqn = eqn.replace(invars=[fresh.get(index, atom) for index, atom in enumerate(eqn.invars)])
    return jax.core.eval_jaxpr(_program_of(eqn, atoms), [], *(operands[index] for index in slots))


def _program_of(eqn: Equation, invars: list) -> Any:
    return core.Jaxpr([], invars, list(eqn.outvars), [eqn], eqn.effects, _description())


@functools.cache
def _description() -> Any:
    """What a jaxpr must say of its origin, here that of an empty one."""
    return jax.make_jaxpr(lambda: ())().jaxpr.debug_info
