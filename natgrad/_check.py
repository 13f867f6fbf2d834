"""Refuse bad input: at once where values are concrete, at run time where they are traced.

Messages begin with the function that the user called. Public functions are decorated with `public`, which remembers
their name while they run; whatever they call reads it with `caller()`."""

import functools
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any, NamedTuple, ParamSpec, TypeVar

import equinox as eqx
import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

Value = TypeVar("Value")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_caller: ContextVar[str | None] = ContextVar("_caller", default=None)


def public(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """A public function or method, in whose name errors inside it are raised unless another one called it."""
    is_method = "." in function.__qualname__.rpartition("<locals>.")[2]

    @functools.wraps(function)
    def named(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if _caller.get() is not None:
            return function(*args, **kwargs)
        token = _caller.set(_method_name(args[0], function.__name__) if is_method else f"`{function.__name__}`")
        try:
            return function(*args, **kwargs)
        finally:
            _caller.reset(token)

    return named


def caller() -> str:
    """The public function that the user called, as it stands in messages."""
    return _caller.get() or "natgrad"


def _method_name(instance: Any, method: str) -> str:
    owner = type(instance).__name__
    return f"`{owner}`" if method in ("__init__", "__check_init__", "__call__") else f"`{owner}.{method}`"


class Requirement(NamedTuple):
    """A condition on values, with the words that explain its failure.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    rate = jnp.array(-1.0)
    requirement = ng.Requirement(rate > 0, "a rate above 0", "Take the exponential of the output.")
    assert not requirement.holds
    ```
    """

    holds: Bool[Array, ""]
    needs: str
    remedy: str


def is_concrete(tree: Any) -> bool:
    """Whether every leaf has a value now, rather than being traced."""
    return not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def require(
    value: Value, requirements: Iterable[Requirement], label: str | None = None, *, traced: bool = True
) -> Value:
    """`value`, if it meets the requirements. Messages refer to it by `label`, or else by the function called.

    Concrete values that fail raise a `ValueError` that shows them. Traced values raise at run time
    through `equinox.error_if`, or pass unchecked with `traced=False` (inside products with a
    metric and inside optimiser steps, which report through their results instead)."""
    label = caller() if label is None else label
    for holds, needs, remedy in requirements:
        if is_concrete((holds, value)):
            if not bool(jnp.all(holds)):
                raise ValueError(f"{label} needs {needs}, but got {show(value)}. {remedy}")
        elif traced:
            message = f"{label} needs {needs}, but some entry was not. {remedy}"
            value = eqx.error_if(value, jnp.logical_not(jnp.all(holds)), message)
    return value


def are_met(requirements: Iterable[Requirement]) -> Bool[Array, ""]:
    """Whether all requirements hold."""
    return jnp.all(jnp.stack([jnp.all(one.holds) for one in requirements]))


def show(value: Any) -> str:
    """A value in few characters, for error messages."""
    with np.printoptions(precision=4, threshold=8, edgeitems=2):
        text = str(jax.tree.map(np.asarray, value))
    return "`" + " ".join(text.split()) + "`"


def real_array(value: Any, label: str, dtype: Any = None) -> Array:
    """`value` as a real floating-point array of single or double precision.

    Python numbers and lists become arrays of the default dtype; arrays of integers or complex
    numbers are refused, since a gradient with respect to them has no meaning."""
    if not isinstance(value, jax.Array | np.ndarray | np.generic):
        try:
            value = np.asarray(value, dtype=float)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{label} must be an array of real numbers, but got `{type(value).__name__}`. "
                "Pass an array, or a Python number."
            ) from error
        return jnp.asarray(value, dtype=dtype or jnp.result_type(float))
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(
            f"{label} must be real floating-point, but got dtype `{value.dtype}`. Convert it with `.astype(float)`."
        )
    array = jnp.asarray(value)
    if array.dtype.itemsize < 4:
        array = array.astype(jnp.float32)
    return array if dtype is None else array.astype(dtype)


def integer_array(value: Any, label: str) -> Array:
    """`value` as an array of integer labels."""
    dtype: Any = np.asarray(value).dtype if isinstance(value, int | list | tuple) else getattr(value, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"{label} must be integer labels, but got `{dtype or type(value).__name__}`. "
            "Convert one-hot rows with `jnp.argmax(x, axis=-1)`."
        )
    return wide_integers(jnp.asarray(value))


def wide_integers(x: Array) -> Array:
    """Integers of at least 32 bits: next to narrower ones, a number of classes such as 256 would wrap around."""
    return x.astype(jnp.int32) if x.dtype.itemsize < 4 else x


def aligned(y: Any, shape: tuple[int, ...], label: str) -> Array:
    """A target of one example in the shape that belongs to its output: the same, but for axes of size one."""
    target = jnp.asarray(y)
    given = tuple(target.shape)
    if [size for size in given if size != 1] != [size for size in shape if size != 1]:
        raise ValueError(
            f"{label} needs a target of shape {tuple(shape)} for the output of one example, but got {given}. Check "
            "the axes of the targets, and of the outputs of the model."
        )
    return target.reshape(shape)


def as_number(value: Any) -> Any:
    """A number as a weakly typed scalar, which promotes like the number does and can change without a new compilation.
    Anything else, such as an array or a schedule, is returned unchanged."""
    if not isinstance(value, bool | int | float | np.number):
        return value
    # Also inside `jit`, where the number would be traced, and checks of its bounds could no longer read it.
    with jax.ensure_compile_time_eval():
        return jnp.asarray(float(value))


def number(default: Any) -> Any:
    """A field of a module that holds a number (or a schedule, or nothing)."""
    return eqx.field(default=default, converter=as_number)


def check_number(
    value: Any,
    name: str,
    *,
    least: int | None = None,
    above: int | None = None,
    most: int | None = None,
    below: Any = None,
    schedules: bool = False,
) -> None:
    """Refuse what is neither a number between the given bounds nor, where allowed, a schedule. Traced numbers pass."""
    bounds = [
        f"of at least {least}" if least is not None else f"above {above}" if above is not None else "",
        f"of at most {most}" if most is not None else f"below {_shown(below)}" if below is not None else "",
    ]
    wanted = " ".join(["a number", " and ".join(filter(None, bounds))]).strip()
    wanted += " or a schedule" if schedules else ""
    if callable(value):
        if schedules:
            return
        raise TypeError(
            f"{caller()} needs {name} to be {wanted}, but got a function: a schedule is not possible here, since it "
            "would be read once and then ignored."
        )
    if not is_concrete((value, below)):
        return
    is_number = isinstance(value, bool | int | float | np.number) or getattr(value, "shape", None) == ()
    if not is_number or not jnp.issubdtype(jnp.result_type(value), jnp.number):
        raise TypeError(f"{caller()} needs {name} to be {wanted}, but got `{type(value).__name__}`.")
    # As Python numbers: under `jit` even constants compare to a traced value.
    number = float(value)
    is_inside = [
        least is None or number >= least,
        above is None or number > above,
        most is None or number <= most,
        below is None or number < float(below),
    ]
    if not all(is_inside):
        raise ValueError(f"{caller()} needs {name} to be {wanted}, but got {_shown(value)}.")


def _shown(value: Any) -> str:
    """A number for a message. Of an array in single precision, only the digits it has."""
    return str(np.asarray(value)) if isinstance(value, jax.Array) else str(value)


def check_damping(damping: Any) -> bool:
    """Whether the damping is known to be zero now; a negative number is refused. A Python number is known even while
    everything else is traced."""
    if jnp.ndim(damping):
        raise ValueError(f"{caller()}: `damping` must be one number, but got shape {jnp.shape(damping)}.")
    if not is_concrete(damping):
        return False
    if not np.asarray(damping) >= 0:
        raise ValueError(f"{caller()}: `damping` needs a number of at least 0, but got `{damping}`.")
    return not np.asarray(damping) > 0
