"""Which parameters are trained."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from natgrad import _text, _tree
from natgrad._check import caller
from natgrad._tree import check_paths, fits, option_for

# Collections of flax that hold what a model keeps besides its parameters, and the variables of nnx that do.
COLLECTIONS = ("batch_stats", "cache", "intermediates", "perturbations")
VARIABLES = ("BatchStat", "Cache", "Intermediate", "Perturbation")


def is_floating(leaf: Any) -> bool:
    """Whether a leaf is a floating-point array, or the shape of one."""
    return hasattr(leaf, "shape") and jnp.issubdtype(getattr(leaf, "dtype", int), jnp.floating)


def as_choice(trainable: Any) -> Any:
    """What was said of trained parameters, in a form that can be read many times and compared."""
    chosen = list(trainable) if isinstance(trainable, Iterator) else trainable
    return jax.tree.map(lambda leaf: bool(leaf) if isinstance(leaf, np.bool_) else leaf, chosen)


def partition(params: PyTree, trainable: Any) -> tuple[PyTree, PyTree]:
    """The leaves to train and the others, with `None` in place of those of the other kind."""
    if trainable is None:
        return eqx.partition(params, is_floating)
    return eqx.partition(params, filter_of(params, trainable))


def filter_of(params: PyTree, trainable: Any) -> PyTree:
    """What to train as a tree of true and false, from any way to say it."""
    flags = _flags(params, trainable)
    for (path, leaf), flag in zip(jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(flags), strict=True):
        if flag and _is_complex(leaf):
            _refuse_complex(path, leaf)
    return jax.tree.map(lambda flag, leaf: flag and is_floating(leaf), flags, params)


def _flags(params: PyTree, trainable: Any) -> PyTree:
    """Whether each leaf is meant, be it a parameter or not."""
    names = iter(_tree.names(params))
    if isinstance(trainable, str):
        trainable = [trainable]
    if _is_prefix(trainable, params):
        return jax.tree.map(lambda flag, part: jax.tree.map(lambda _: bool(flag), part), trainable, params)
    if callable(trainable):
        takes_path = _takes_path(trainable)
        return jax.tree.map(lambda leaf: bool(trainable(next(names), leaf) if takes_path else trainable(leaf)), params)
    if isinstance(trainable, Mapping):
        options = {str(path): bool(flag) for path, flag in trainable.items()}
        check_paths(options, _tree.names(params), "trainable")
        default = not any(options.values())

        def chosen(name):
            return default if (own := option_for(options, name)) is None else own

        return jax.tree.map(lambda _: chosen(next(names)), params)
    paths: list[Any] = list(trainable) if isinstance(trainable, Iterable) else [None]
    if all(isinstance(path, str) for path in paths):
        check_paths(paths, _tree.names(params), "trainable")
        return jax.tree.map(lambda _: _is_below(next(names), paths), params)
    raise TypeError(
        f"{caller()} needs `trainable` to be a path such as `\"params['head']\"`, several of them, a mapping from "
        "paths to `True` or `False`, a function of a leaf or of its path and the leaf, or a tree of `True` and `False` "
        f"like the parameters, but got `{type(trainable).__name__}`."
    )


def _is_prefix(trainable: Any, params: PyTree) -> bool:
    """Whether this is a tree of true and false that begins like the parameters."""
    leaves = jax.tree.leaves(trainable)
    if not leaves or not all(isinstance(leaf, bool | np.bool_) for leaf in leaves):
        return False
    try:
        jax.tree.map(lambda flag, part: None, trainable, params)
    except (ValueError, TypeError):
        return False
    return True


def _is_below(name: str, paths: list[Any]) -> bool:
    return any(fits(path, name) for path in paths)


def _takes_path(function: Callable) -> bool:
    """Whether a function can be called with a path and a leaf, or else with a leaf."""
    try:
        inspect.signature(function).bind("", None)
    except (ValueError, TypeError):
        return False
    return True


def _is_complex(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", int), jnp.complexfloating)


def _refuse_complex(path: Any, leaf: Any) -> None:
    name = "params" + jax.tree_util.keystr(path)
    raise TypeError(
        f"{caller()} needs real parameters, but `{name}` is `{leaf.dtype}`. Train its real and imaginary part as two "
        f"arrays, or freeze it with `trainable={{{name!r}: False}}`."
    )


def check_trained(params: PyTree, trained: PyTree, trainable: Any) -> None:
    """Refuse complex parameters that nobody said are frozen, and warn if running averages are trained that nobody
    named. `trained` has `None` in place of frozen leaves."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if trainable is None and _is_complex(leaf):
            _refuse_complex(path, leaf)

    def is_kept(path):
        return any(str(getattr(key, "key", getattr(key, "name", ""))) in COLLECTIONS for key in path)

    leaves = jax.tree_util.tree_leaves_with_path(trained)
    kept = ["params" + jax.tree_util.keystr(path) for path, _ in leaves if is_kept(path)] + _variables(trained)
    named = [trainable] if isinstance(trainable, str) else trainable if isinstance(trainable, Mapping | list) else []
    kept = [name for name in kept if _collection(name) not in named]
    if kept:
        roots = sorted({_collection(name) for name in kept})
        _text.warn(
            f"{caller()} would train {_listed(kept)}, which look like running averages or caches, not parameters. "
            f"Freeze them with `trainable={{{', '.join(f'{root!r}: False' for root in roots)}}}`."
        )


def warn_of_unused(names: Iterable[str]) -> None:
    """Warn of parameters that no output depends on."""
    unused = list(names)
    if unused:
        _text.warn(
            f"{caller()}: no output depends on {_listed(unused)}, so the loss does not train them. If that is "
            f"meant, say so with `trainable={{{', '.join(f'{name!r}: False' for name in unused)}}}`."
        )


def _variables(params: PyTree) -> list[str]:
    """Variables of nnx that are no parameters."""
    is_one = lambda node: type(node).__name__ in VARIABLES
    nodes = jax.tree_util.tree_leaves_with_path(params, is_leaf=is_one)
    kept = [(path, node) for path, node in nodes if is_one(node) and any(map(is_floating, jax.tree.leaves(node)))]
    return ["params" + jax.tree_util.keystr(path) for path, _ in kept]


def _collection(name: str) -> str:
    """The path up to the collection."""
    for collection in COLLECTIONS:
        start = name.find(f"['{collection}']")
        if start >= 0:
            return name[: start + len(collection) + 4]
    return name


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def refuse_numbers(params: PyTree) -> None:
    """A Python number is no array here but would be one under `jit`."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if isinstance(leaf, float):
            raise TypeError(
                f"{caller()} got the Python number {leaf} at `params{jax.tree_util.keystr(path)}`. Make it "
                "an array to train it, or close over it in the model."
            )
