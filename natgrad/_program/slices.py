"""Rules for primitives: whether an equation computes the results of each example from the operands of that example.

A rule takes an `EquationPair`: an equation of the program of a batch and its counterpart for a batch of one, with the
axes along which the examples stand. At least one operand has such an axis, and so has every result. The rule returns
whether, slice by slice along these axes, the equation is its counterpart. It also has to compare the parameters of the
two equations, apart from sizes. `RULES` and `ELEMENTWISE` list the primitives by name; one that is not listed counts as
coupling examples."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from natgrad._program import compat

# In place of an axis: the value is the same for all examples.
SAME = -1


class EquationPair(NamedTuple):
    """An equation of the program of a batch with its counterpart in the program of a batch of one.

    `operands` and `results` are the axes of the examples in these values, or `SAME`."""

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
        """Whether the two equations have equal parameters, apart from those named."""
        batch, single = self.eqn.params, self.single.params
        return batch.keys() == single.keys() and all(
            is_equal(batch[key], single[key]) for key in batch if key not in except_for
        )


def keeps_slices(pair: EquationPair) -> bool:
    name = compat.name(pair.eqn)
    rule = RULES.get(name, elementwise if name in ELEMENTWISE else None)
    return rule is not None and rule(pair)


def is_equal(a: Any, b: Any) -> bool:
    """Whether two parameters are known to be equal; NaN counts as equal to itself."""
    try:
        return a is b or bool(a == b) or bool(a != a and b != b)
    except (TypeError, ValueError):
        return False


def elementwise(pair: EquationPair) -> bool:
    """The operands have one rank or are numbers; shared operands may have axes of size one."""
    if len(set(pair.results)) != 1:
        return False
    axis = pair.results[0]

    def fits(operand: int) -> bool:
        shape = pair.shape(operand)
        is_shared = pair.operands[operand] == SAME and (not shape or shape[axis] == 1)
        return pair.operands[operand] == axis or is_shared

    return pair.agrees() and all(map(fits, range(len(pair.operands))))


def broadcast(pair: EquationPair) -> bool:
    mapping, before, (after,) = pair.params["broadcast_dimensions"], pair.operands[0], pair.results
    if before == SAME:
        is_placed = after not in mapping or pair.shape(0)[mapping.index(after)] == 1
    else:
        is_placed = mapping[before] == after
    return is_placed and len(pair.operands) == 1 and pair.agrees("shape")


def reshape(pair: EquationPair) -> bool:
    """As many entries stand in front of the axis of the examples as before."""
    (before,), (after,) = pair.operands, pair.results
    num_before, num_after = math.prod(pair.shape(0)[:before]), math.prod(pair.params["new_sizes"][:after])
    return num_before == num_after and pair.params["dimensions"] is None and pair.agrees("new_sizes")


def transpose(pair: EquationPair) -> bool:
    return pair.params["permutation"][pair.results[0]] == pair.operands[0] and pair.agrees()


def squeeze(pair: EquationPair) -> bool:
    return pair.agrees() and _drops_others(pair, pair.params["dimensions"])


def reduce(pair: EquationPair) -> bool:
    return pair.agrees() and _drops_others(pair, pair.params["axes"])


def _drops_others(pair: EquationPair, axes: Any) -> bool:
    """Whether dropping `axes` leaves the axis of the examples."""
    before = pair.operands[0]
    after = before - sum(axis < before for axis in axes)
    return len(pair.operands) == 1 and before not in axes and all(axis == after for axis in pair.results)


def along_an_axis(parameter: str) -> Callable[[EquationPair], bool]:
    """The rule for equations that work along the axes in a parameter, and keep all axes."""

    def rule(pair: EquationPair) -> bool:
        axes = pair.params[parameter]
        # Not `isinstance(axes, int)`: an axis may be a NumPy integer, as in the concatenation of `jnp.roll` (JAX
        # 0.10.1). Reproduced by `test_axes_may_be_numpy_integers`.
        axes = tuple(axes) if isinstance(axes, tuple | list) else (axes,)
        example_axes = {*pair.operands, *pair.results}
        return len(example_axes) == 1 and not example_axes & set(axes) and pair.agrees()

    return rule


def in_last_axes(count: Callable[[EquationPair], int]) -> Callable[[EquationPair], bool]:
    """The rule for equations that work in the last `count` axes, and keep the axes in front."""

    def rule(pair: EquationPair) -> bool:
        ranks = [len(atom.aval.shape) for atom in (*pair.eqn.invars, *pair.eqn.outvars)]
        example_axes = {*pair.operands, *pair.results}
        is_in_front = all(axis < min(ranks) - count(pair) for axis in example_axes)
        return len(example_axes) == 1 and is_in_front and pair.agrees()

    return rule


def stack(pair: EquationPair) -> bool:
    before, new = pair.operands[0], pair.params["axis"]
    return set(pair.operands) == {before} and pair.results == [before + (new <= before)] and pair.agrees()


def unstack(pair: EquationPair) -> bool:
    return pair.agrees() and _drops_others(pair, (pair.params["axis"],))


def tile(pair: EquationPair) -> bool:
    return pair.params["reps"][pair.operands[0]] == 1 and _keeps_axes(pair)


def slice_of(pair: EquationPair) -> bool:
    """All examples are taken."""
    (axis,), params, single_params = pair.operands, pair.params, pair.single.params
    strides = params["strides"]
    is_whole = params["start_indices"][axis] == 0 and params["limit_indices"][axis] == pair.shape(0)[axis]
    is_same = is_equal(strides, single_params["strides"]) and all(
        _without(axis, params[name]) == _without(axis, single_params[name])
        for name in ("start_indices", "limit_indices")
    )
    return is_whole and is_same and (strides is None or strides[axis] == 1) and pair.results == [axis]


def _without(axis: int, numbers: Any) -> list[Any]:
    """The numbers of all axes but one."""
    return [number for k, number in enumerate(numbers) if k != axis]


def dynamic_slice(pair: EquationPair) -> bool:
    """All examples are taken, at starts that they share."""
    axis, *starts = pair.operands
    sizes, single_sizes = pair.params["slice_sizes"], pair.single.params["slice_sizes"]
    is_whole = axis != SAME and sizes[axis] == pair.shape(0)[axis]
    is_same = _without(axis, sizes) == _without(axis, single_sizes)
    return is_whole and set(starts) == {SAME} and is_same and pair.results == [axis]


def pad(pair: EquationPair) -> bool:
    axis, value = pair.operands
    is_unpadded = pair.params["padding_config"][axis] == (0, 0, 0)
    return value == SAME and is_unpadded and pair.agrees() and pair.results == [axis]


def iota(pair: EquationPair) -> bool:
    """Numbers count along an axis that is not the axis of the examples."""
    return pair.params["dimension"] not in pair.results and pair.agrees("shape")


def _keeps_axes(pair: EquationPair) -> bool:
    """The axes of the examples are the same in operands and results."""
    return pair.agrees() and pair.results == pair.operands


def window(pair: EquationPair) -> bool:
    """Each window holds one example."""
    axis, params = pair.operands[0], pair.params
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    is_single = all(params[name][axis] == 1 for name in names) and tuple(params["padding"][axis]) == (0, 0)
    return len(pair.operands) == 1 and is_single and _keeps_axes(pair)


def dot(pair: EquationPair) -> bool:
    """The axis is mapped in both operands, or free in one operand while the other is shared."""
    parts = compat.dot(pair.eqn)
    assert parts is not None
    axes, (after,) = pair.operands, pair.results
    if not pair.agrees():
        return False
    if SAME not in axes:
        return all(axes[k] in parts.mapped[k] and parts.mapped[k].index(axes[k]) == after for k in (0, 1))
    k = 1 if axes[0] == SAME else 0
    free = [parts.free(side, len(pair.shape(side))) for side in (0, 1)]
    if axes[k] not in free[k]:
        return False
    return after == len(parts.mapped[0]) + (len(free[0]) if k else 0) + free[k].index(axes[k])


def convolution(pair: EquationPair) -> bool:
    parts = compat.convolution(pair.eqn)
    assert parts is not None
    is_plain = pair.operands == [parts.input_axes[0], SAME] and parts.batch_groups == 1
    return is_plain and pair.results == [parts.output_axes[0]] and pair.agrees("lhs_shape")


def gather(pair: EquationPair) -> bool:
    """Each example has indices, into a table that examples share or into its own table along a mapped axis."""
    table, indices = pair.operands
    numbers, (after,) = pair.params["dimension_numbers"], pair.results
    rank = len(pair.eqn.outvars[0].aval.shape)
    index_axes = [k for k in range(rank) if k not in numbers.offset_dims]
    is_mapped = table == SAME
    if table != SAME and table in numbers.operand_batching_dims:
        place = list(numbers.operand_batching_dims).index(table)
        is_mapped = numbers.start_indices_batching_dims[place] == indices
    return is_mapped and 0 <= indices < len(index_axes) and index_axes[indices] == after and pair.agrees()


def scatter(pair: EquationPair) -> bool:
    """The array of each example is changed, at indices that examples share (`x.at[:, 3].set`) or at its own indices
    along a mapped axis."""
    target, indices, updates = pair.operands
    numbers = pair.params["dimension_numbers"]
    # `update_jaxpr` combines old and new entries; the name of the primitive already says how.
    if target == SAME or pair.results != [target] or not pair.agrees("update_jaxpr", "update_consts"):
        return False
    if target in numbers.operand_batching_dims:
        place = list(numbers.operand_batching_dims).index(target)
        rank = len(pair.shape(2))
        index_axes = [k for k in range(rank) if k not in numbers.update_window_dims]
        is_mapped = numbers.scatter_indices_batching_dims[place] == indices
        return is_mapped and 0 <= indices < len(index_axes) and index_axes[indices] == updates
    outside = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window_axes = [k for k in range(len(pair.shape(0))) if k not in outside]
    if indices != SAME or target not in window_axes or target in numbers.scatter_dims_to_operand_dims:
        return False
    update_axis = numbers.update_window_dims[window_axes.index(target)]
    return updates == update_axis and pair.shape(2)[update_axis] == pair.shape(0)[target]


def dynamic_update_slice(pair: EquationPair) -> bool:
    """All examples are changed, at starts that they share."""
    target, update, *starts = pair.operands
    is_whole = target == update != SAME and pair.shape(1)[target] == pair.shape(0)[target]
    return is_whole and set(starts) == {SAME} and pair.results == [target] and pair.agrees()


ELEMENTWISE = {
    *("abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp clz").split(),
    *("complex conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1").split(),
    *("floor ge gt igamma igammac imag integer_pow is_finite le lgamma log log1p logistic lt max min mul name").split(),
    *("ne neg nextafter not one_minus_square optimization_barrier or polygamma population_count pow real").split(),
    *("reduce_precision regularized_incomplete_beta rem round rsqrt select_n shift_left").split(),
    *(
        "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh xor zeta"
    ).split(),
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
    **dict.fromkeys(
        ["random_bits", "random_split", "random_wrap", "random_unwrap", "bitcast_convert_type"], _keeps_axes
    ),
    "fft": in_last_axes(lambda pair: len(pair.params["fft_lengths"])),
    **dict.fromkeys(["argmax", "argmin"], reduce),
    **dict.fromkeys([f"reduce_{name}" for name in ("sum", "max", "min", "prod", "and", "or", "xor")], reduce),
    **dict.fromkeys([f"cum{name}" for name in ("sum", "prod", "max", "min", "logsumexp")], along_an_axis("axis")),
    **dict.fromkeys([f"reduce_window_{name}" for name in ("max", "min", "sum")], window),
    **dict.fromkeys(["cholesky", "eigh", "qr", "lu", "triangular_solve"], in_last_axes(lambda pair: 2)),
}
