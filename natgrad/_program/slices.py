"""Which equations map slices of their operands, one for every example, to slices of their results.

One function for every kind of equation, by the name of its primitive. It is given an equation of the program of a batch
with the axes along which the examples stand: `SAME` for operands that the examples share, at least one of the others,
and one for every result. It says whether slice by slice the equation is what a batch of one would compute; that its
other parameters are the same is checked by it too. An equation that has no function here is not known to be."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from natgrad._program import compat

SAME = -1


class EquationPair(NamedTuple):
    """An equation of the program of a batch, the same in that of a batch of one, and the axes of the examples."""

    eqn: compat.Equation
    single: compat.Equation
    operands: list[int]
    results: list[int]

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params

    def shape(self, operand: int) -> tuple[int, ...]:
        return self.eqn.invars[operand].aval.shape

    def agrees(self, *except_for: str) -> bool:
        """Whether the parameters are those of the other equation, apart from some."""
        ours, theirs = self.eqn.params, self.single.params
        return ours.keys() == theirs.keys() and all(is_equal(ours[k], theirs[k]) for k in ours if k not in except_for)


def keeps_slices(step: EquationPair) -> bool:
    name = compat.name(step.eqn)
    rule = RULES.get(name, elementwise if name in ELEMENTWISE else None)
    return rule is not None and rule(step)


def is_equal(a: Any, b: Any) -> bool:
    """Whether two parameters are known to be equal; NaN counts as equal to itself."""
    try:
        return a is b or bool(a == b) or bool(a != a and b != b)
    except (TypeError, ValueError):
        return False


def elementwise(step: EquationPair) -> bool:
    """Operands of the same rank, of which some may have axes of size one, and numbers."""
    (axis,) = set(step.results) if len(set(step.results)) == 1 else (None,)
    shapes = [step.shape(k) for k in range(len(step.operands))]
    fits = lambda own, shape: own == axis or (own == SAME and (not shape or (axis is not None and shape[axis] == 1)))
    return axis is not None and step.agrees() and all(map(fits, step.operands, shapes))


def broadcast(step: EquationPair) -> bool:
    mapping, (axis,) = step.params["broadcast_dimensions"], step.results
    own = step.operands[0]
    is_placed = mapping[own] == axis if own != SAME else axis not in mapping or step.shape(0)[mapping.index(axis)] == 1
    return is_placed and len(step.operands) == 1 and step.agrees("shape")


def reshape(step: EquationPair) -> bool:
    """The axis stays where it is among the entries in their order."""
    (own,), (axis,) = step.operands, step.results
    before = math.prod(step.shape(0)[:own]), math.prod(step.params["new_sizes"][:axis])
    return before[0] == before[1] and step.params["dimensions"] is None and step.agrees("new_sizes")


def transpose(step: EquationPair) -> bool:
    return step.params["permutation"][step.results[0]] == step.operands[0] and step.agrees()


def squeeze(step: EquationPair) -> bool:
    return step.agrees() and _is_left_out(step, step.params["dimensions"])


def reduce(step: EquationPair) -> bool:
    return step.agrees() and _is_left_out(step, step.params["axes"])


def _is_left_out(step: EquationPair, axes: Any) -> bool:
    """Whether some axes go, but not that of the examples."""
    own = step.operands[0]
    left = own - sum(axis < own for axis in axes)
    return len(step.operands) == 1 and own not in axes and all(axis == left for axis in step.results)


def along_an_axis(parameter: str) -> Callable[[EquationPair], bool]:
    """Equations that work along one axis, or some, and keep all."""

    def rule(step: EquationPair) -> bool:
        axes = step.params[parameter]
        # An axis may be a NumPy integer: `jnp.roll` joins its two parts along one (JAX 0.10.1).
        axes = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
        same = {*step.operands, *step.results}
        return len(same) == 1 and not same & set(axes) and step.agrees()

    return rule


def in_last_axes(count: Callable[[EquationPair], int]) -> Callable[[EquationPair], bool]:
    """Equations that work in the last axes, and keep those in front."""

    def rule(step: EquationPair) -> bool:
        inner = count(step)
        ranks = [len(atom.aval.shape) for atom in (*step.eqn.invars, *step.eqn.outvars)]
        axes = {*step.operands, *step.results}
        return len(axes) == 1 and step.agrees() and all(next(iter(axes)) < rank - inner for rank in ranks)

    return rule


def stack(step: EquationPair) -> bool:
    own, new = step.operands[0], step.params["axis"]
    return set(step.operands) == {own} and step.results == [own + (new <= own)] and step.agrees()


def unstack(step: EquationPair) -> bool:
    return step.agrees() and _is_left_out(step, (step.params["axis"],))


def tile(step: EquationPair) -> bool:
    return step.params["reps"][step.operands[0]] == 1 and _keeps(step)


def slice_of(step: EquationPair) -> bool:
    """The whole of the axis is taken."""
    (own,), p = step.operands, step.params
    strides = p["strides"]
    is_whole = p["start_indices"][own] == 0 and p["limit_indices"][own] == step.shape(0)[own]
    others = lambda q: [
        tuple(x for k, x in enumerate(q[name]) if k != own) for name in ("start_indices", "limit_indices")
    ]
    is_same = others(p) == others(step.single.params) and is_equal(strides, step.single.params["strides"])
    return is_whole and is_same and (strides is None or strides[own] == 1) and step.results == [own]


def dynamic_slice(step: EquationPair) -> bool:
    """The whole of the axis is taken, at places that the examples share."""
    own, *starts = step.operands
    sizes = [equation.params["slice_sizes"] for equation in (step.eqn, step.single)]
    others = [[size for k, size in enumerate(own_sizes) if k != own] for own_sizes in sizes]
    is_whole = own != SAME and sizes[0][own] == step.shape(0)[own]
    return is_whole and set(starts) == {SAME} and others[0] == others[1] and step.results == [own]


def pad(step: EquationPair) -> bool:
    own, value = step.operands
    return value == SAME and step.params["padding_config"][own] == (0, 0, 0) and step.agrees() and step.results == [own]


def iota(step: EquationPair) -> bool:
    """Numbers that count along another axis than that of the examples."""
    return step.params["dimension"] not in step.results and step.agrees("shape")


def _keeps(step: EquationPair) -> bool:
    """The axis stays where it is."""
    return step.agrees() and step.results == step.operands


def window(step: EquationPair) -> bool:
    own, p = step.operands[0], step.params
    alone = all(
        p[name][own] == 1 for name in ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    )
    return len(step.operands) == 1 and alone and tuple(p["padding"][own]) == (0, 0) and _keeps(step)


def dot(step: EquationPair) -> bool:
    """The axis is mapped in both operands, or free in one that meets something shared."""
    parts = compat.dot(step.eqn)
    assert parts is not None
    own, (axis,) = step.operands, step.results
    if not step.agrees() or SAME not in own:
        places = [list(parts.mapped[k]).index(own[k]) if own[k] in parts.mapped[k] else None for k in (0, 1)]
        return step.agrees() and places[0] is not None and places == [axis, axis]
    k = 1 if own[0] == SAME else 0
    free = [parts.free(side, len(step.shape(side))) for side in (0, 1)]
    if own[k] not in free[k]:
        return False
    return axis == len(parts.mapped[0]) + (len(free[0]) if k else 0) + free[k].index(own[k])


def convolution(step: EquationPair) -> bool:
    parts = compat.convolution(step.eqn)
    assert parts is not None
    is_plain = step.operands == [parts.input_axes[0], SAME] and parts.batch_groups == 1
    return is_plain and step.results == [parts.output_axes[0]] and step.agrees("lhs_shape")


def gather(step: EquationPair) -> bool:
    """Indices of every example into something shared, or into something of its own that is mapped along."""
    table, own = step.operands
    axes, (axis,) = step.params["dimension_numbers"], step.results
    rank = len(step.eqn.outvars[0].aval.shape)
    batch = [k for k in range(rank) if k not in axes.offset_dims]
    is_mapped = table == SAME
    if table != SAME and table in axes.operand_batching_dims:
        is_mapped = axes.start_indices_batching_dims[list(axes.operand_batching_dims).index(table)] == own
    return is_mapped and 0 <= own < len(batch) and batch[own] == axis and step.agrees()


def scatter(step: EquationPair) -> bool:
    """Something of every example is changed: all along its axis at places that the examples share (`x.at[:, 3].set`),
    or at places of its own, mapped along."""
    target, indices, updates = step.operands
    numbers = step.params["dimension_numbers"]
    # The function that combines old and new is told by the name of the primitive.
    if target == SAME or step.results != [target] or not step.agrees("update_jaxpr", "update_consts"):
        return False
    if target in numbers.operand_batching_dims:
        place = list(numbers.operand_batching_dims).index(target)
        rank = len(step.shape(2))
        over_indices = [k for k in range(rank) if k not in numbers.update_window_dims]
        is_mapped = numbers.scatter_indices_batching_dims[place] == indices
        return is_mapped and 0 <= indices < len(over_indices) and over_indices[indices] == updates
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [k for k in range(len(step.shape(0))) if k not in gone]
    if indices != SAME or target not in kept or target in numbers.scatter_dims_to_operand_dims:
        return False
    window = numbers.update_window_dims[kept.index(target)]
    return updates == window and step.shape(2)[window] == step.shape(0)[target]


def dynamic_update_slice(step: EquationPair) -> bool:
    """The whole of the axis is changed, at places that the examples share."""
    target, update, *starts = step.operands
    is_whole = target == update != SAME and step.shape(1)[target] == step.shape(0)[target]
    return is_whole and set(starts) == {SAME} and step.results == [target] and step.agrees()


ELEMENTWISE = {
    *("abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz").split(),
    *("complex conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1").split(),
    *("floor ge gt igamma igammac imag integer_pow is_finite le lgamma log log1p logistic lt max min mul name").split(),
    *("ne neg nextafter not one_minus_square optimization_barrier or polygamma population_count pow real").split(),
    *(
        "reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left shift_right_arithmetic"
    ).split(),
    *("shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta").split(),
}
SCATTERED = ("add", "sub", "mul", "min", "max")
RULES: dict[str, Callable[[EquationPair], bool]] = {
    "broadcast_in_dim": broadcast,
    "reshape": reshape,
    "transpose": transpose,
    "squeeze": squeeze,
    "slice": slice_of,
    "dynamic_slice": dynamic_slice,
    "pad": pad,
    "iota": iota,
    "dot_general": dot,
    "conv_general_dilated": convolution,
    "gather": gather,
    "dynamic_update_slice": dynamic_update_slice,
    **dict.fromkeys(["scatter", *(f"scatter{sign}{name}" for sign in "-_" for name in SCATTERED)], scatter),
    "concatenate": along_an_axis("dimension"),
    "rev": along_an_axis("dimensions"),
    "sort": along_an_axis("dimension"),
    "split": along_an_axis("axis"),
    "top_k": along_an_axis("axis"),
    "stack": stack,
    "unstack": unstack,
    "tile": tile,
    "random_fold_in": elementwise,
    **dict.fromkeys(["random_bits", "random_split", "random_wrap", "random_unwrap", "bitcast_convert_type"], _keeps),
    "fft": in_last_axes(lambda step: len(step.params["fft_lengths"])),
    **dict.fromkeys(["argmax", "argmin"], reduce),
    **dict.fromkeys([f"reduce_{name}" for name in ("sum", "max", "min", "prod", "and", "or", "xor")], reduce),
    **dict.fromkeys([f"cum{name}" for name in ("sum", "prod", "max", "min", "logsumexp")], along_an_axis("axis")),
    **dict.fromkeys([f"reduce_window_{name}" for name in ("max", "min", "sum")], window),
    **dict.fromkeys(["cholesky", "eigh", "qr", "lu", "triangular_solve"], in_last_axes(lambda step: 2)),
}
