"""Methods of a module that both `jax.jit` and `equinox.filter_jit` compile."""

from collections.abc import Callable
from typing import Any

import equinox as eqx


class CompilableMethod(eqx.Module):
    """A method with its module, as a tree: `equinox.filter_jit` sees the numbers of the module as arguments, so that
    other numbers, of an optimiser for example, need no new compilation.

    It is compared by identity, since `jax.jit` hashes the functions that it compiles, and arrays have no hash: a bound
    method of an `equinox.Module` is hashed by its fields (equinox 0.13.8). Reproduced by
    `test_methods_of_modules_with_arrays_have_no_hash`."""

    function: Callable = eqx.field(static=True)
    module: eqx.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.module, *args, **kwargs)

    def __hash__(self) -> int:
        return hash((self.function, id(self.module)))

    def __eq__(self, other: object) -> bool:  # pyright: ignore[reportIncompatibleMethodOverride]
        if not isinstance(other, CompilableMethod):
            return False
        return self.function is other.function and self.module is other.module

    @property
    def __wrapped__(self) -> Callable:
        return self.function.__get__(self.module, type(self.module))

    @property
    def __name__(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.function.__name__


class compilable:
    """Decorator of methods that users compile."""

    def __init__(self, function: Callable):
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: Any, owner: type) -> Any:
        return self.function if instance is None else CompilableMethod(self.function, instance)
