"""Functions that natgrad compiles by itself, for users who call it outside `jax.jit`."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import equinox as eqx
import jax.numpy as jnp

from natgrad._check import is_concrete

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Compile a function, once for the shapes of its arguments. Inside a program that is being compiled it is inlined:
    a model may have captured values of that program, and a cache must not keep these alive."""
    alone = eqx.filter_jit(function)

    @functools.wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        # Under `jit` constants are traced too.
        is_outside = is_concrete(jnp.zeros(()))
        return alone(*args, **kwargs) if is_outside else function(*args, **kwargs)

    return call
