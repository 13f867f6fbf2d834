"""Trees of arrays on disk: complete or not there, and never silently another tree."""

import json
import os
import re
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import PyTree

from natgrad._check import public

# What is written into every file, and raised whenever its form, or the state of the optimiser, changes.
FORMAT, VERSION = "natgrad checkpoint", 2


@public
def save_checkpoint(path: str | os.PathLike, tree: PyTree) -> None:
    """Write a tree of arrays, random keys and numbers to a file, such as `(params, state)`.

    The file appears under its name only when all of it has reached the disk, so that an interrupted write leaves what
    was there before.

    ```python
    import tempfile

    import jax
    import jax.numpy as jnp
    import natgrad as ng

    params, key = {"w": jnp.ones(2)}, jax.random.key(0)
    with tempfile.TemporaryDirectory() as directory:
        ng.save_checkpoint(f"{directory}/run.npz", (params, key))
        params, key = ng.load_checkpoint(f"{directory}/run.npz", like=(params, key))
    ```
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    described, payload = [], {}
    for number, (key_path, leaf) in enumerate(leaves):
        array, kind = _as_numpy(leaf)
        described.append(
            {"path": jax.tree_util.keystr(key_path), "dtype": str(array.dtype), "shape": array.shape, "key": kind}
        )
        # As bytes: NumPy cannot write bfloat16 and the 8-bit types of JAX without pickling them.
        payload[f"leaf{number}"] = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    header = json.dumps({"format": FORMAT, "version": VERSION, "leaves": described})
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder, since a file can be renamed in one piece only within a file system.
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez(file, header=np.frombuffer(header.encode(), np.uint8), **payload)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    _sync_directory(target.parent)


@public
def load_checkpoint(path: str | os.PathLike, like: PyTree) -> PyTree:
    """The tree in a file that `save_checkpoint` wrote.

    It must have the structure, shapes and dtypes of `like` (arrays or their shapes), and is put on the same devices.

    ```python
    import tempfile

    import jax.numpy as jnp
    import natgrad as ng

    with tempfile.TemporaryDirectory() as directory:
        ng.save_checkpoint(f"{directory}/params.npz", {"w": jnp.ones(2)})
        params = ng.load_checkpoint(f"{directory}/params.npz", like={"w": jnp.zeros(2)})
    assert jnp.allclose(params["w"], 1.0)
    ```
    """
    header, payload = _read(Path(path))
    wanted, treedef = jax.tree_util.tree_flatten_with_path(like)
    _check_same(header, wanted, path)
    restored = []
    for number, (described, (_, leaf)) in enumerate(zip(header["leaves"], wanted, strict=True)):
        raw = payload[f"leaf{number}"].tobytes()
        array = np.frombuffer(raw, _dtype(described["dtype"])).reshape(described["shape"])
        restored.append(_like_leaf(array, described["key"], leaf))
    return jax.tree.unflatten(treedef, restored)


class Checkpoints:
    """A directory of checkpoints, one for every step that was saved, of which the newest `keep` stay.

    ```python
    import tempfile

    import jax.numpy as jnp
    import natgrad as ng

    with tempfile.TemporaryDirectory() as directory:
        checkpoints = ng.Checkpoints(directory, keep=2)
        for step in (10, 20, 30):
            checkpoints.save(step, {"w": jnp.full(2, step)})
        step, tree = checkpoints.restore({"w": jnp.zeros(2, int)})
    assert step == 30 and tree["w"][0] == 30
    ```
    """

    def __init__(self, directory: str | os.PathLike, keep: int = 3):
        if keep < 1:
            raise ValueError(f"`Checkpoints` needs to `keep` at least 1, but got {keep}.")
        self.directory, self.keep = Path(directory), keep

    def save(self, step: int, tree: PyTree) -> Path:
        path = self.directory / f"step-{step:09d}.npz"
        save_checkpoint(path, tree)
        # After saving, so that an interruption leaves one checkpoint too many rather than one too few.
        others = [other for other in self.steps() if other != step]
        for old in others[: max(0, len(others) + 1 - self.keep)]:
            (self.directory / f"step-{old:09d}.npz").unlink(missing_ok=True)
        return path

    def steps(self) -> list[int]:
        """The steps that were saved and kept, in order."""
        if not self.directory.is_dir():
            return []
        # Drafts and files of others in the folder are left alone.
        matches = (re.fullmatch(r"step-(\d{9,})\.npz", path.name) for path in self.directory.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def restore(self, like: PyTree, step: int | None = None) -> tuple[int, PyTree]:
        """The newest step, or the one that is given, and its tree."""
        steps = self.steps()
        if not steps or (step is not None and step not in steps):
            what = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise FileNotFoundError(f"There is {what} in `{self.directory}`. Steps there: {steps or 'none'}.")
        chosen = steps[-1] if step is None else step
        try:
            return chosen, load_checkpoint(self.directory / f"step-{chosen:09d}.npz", like)
        except ValueError as error:
            others = [other for other in steps if other < chosen]
            hint = f" An earlier one is there: `restore(like, step={others[-1]})`." if others else ""
            raise ValueError(f"{error}{hint}") from error


def _read(path: Path) -> tuple[dict, dict[str, np.ndarray]]:
    try:
        # Pickles could run code of whoever wrote the file.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            payload = {name: arrays[name] for name in arrays.files}
        header = json.loads(payload.pop("header").tobytes())
    except FileNotFoundError:
        raise
    except (zipfile.BadZipFile, KeyError, ValueError, OSError, EOFError) as error:
        raise ValueError(
            f"`{path}` is not a checkpoint, or not a whole one ({error}). It may have been cut short while it was "
            "copied."
        ) from error
    if header.get("format") != FORMAT:
        raise ValueError(f"`{path}` is no checkpoint of natgrad.")
    if header["version"] > VERSION:
        raise ValueError(
            f"`{path}` was written by a newer natgrad (version {header['version']} of the format; this one reads up to "
            f"{VERSION}). Upgrade natgrad to read it."
        )
    return header, payload


def _check_same(header: dict, wanted: list, path: Any) -> None:
    def facts(leaf):
        return "key of " * _is_key(leaf) + str(_bare(leaf).dtype), list(_bare(leaf).shape)

    expected = {jax.tree_util.keystr(key_path): facts(leaf) for key_path, leaf in wanted}
    kind = lambda leaf: "key of " if leaf["key"] else ""
    given = {leaf["path"]: (kind(leaf) + leaf["dtype"], list(leaf["shape"])) for leaf in header["leaves"]}
    if list(expected) != list(given):
        missing, extra = [p for p in expected if p not in given], [p for p in given if p not in expected]
        if header["version"] < VERSION:
            raise ValueError(
                f"`{path}` was written by an older natgrad (version {header['version']} of the format; this one writes "
                f"{VERSION}), whose optimisers remember other things: {missing[:3] or 'nothing'} missing, "
                f"{extra[:3] or 'nothing'} in excess. Finish the run with the natgrad that wrote it, or start anew."
            )
        raise ValueError(
            f"`{path}` holds another tree: {missing[:3] or 'nothing'} missing, {extra[:3] or 'nothing'} in excess"
            + (", or the same in another order. " if not missing and not extra else ". ")
            + "Use the same model, optimiser and structure as when it was saved."
        )
    for name, fact in expected.items():
        if given[name] != fact:
            raise ValueError(
                f"`{path}`: {name or 'the leaf'} is {given[name][0]} of shape {given[name][1]}, but {fact[0]} of shape "
                f"{fact[1]} is needed."
            )


def _as_numpy(leaf: Any) -> tuple[np.ndarray, str | None]:
    if _is_key(leaf):
        return np.asarray(jax.random.key_data(leaf)), str(jax.random.key_impl(leaf))
    return np.asarray(leaf), None


def _is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _bare(leaf: Any) -> Any:
    """A key as the words it is made of, anything else as an array or its shape."""
    if _is_key(leaf):
        return jax.eval_shape(jax.random.key_data, leaf)
    return leaf if hasattr(leaf, "dtype") else np.asarray(leaf)


def _like_leaf(array: np.ndarray, kind: str | None, leaf: Any) -> Any:
    if kind is not None:
        keys = jax.random.wrap_key_data(jnp.asarray(array), impl=kind)
        return jax.device_put(keys, getattr(leaf, "sharding", None))
    if isinstance(leaf, bool | int | float):
        return type(leaf)(array.item())
    if isinstance(leaf, np.ndarray):
        # `np.frombuffer` gives arrays that cannot be written to.
        return array.copy()
    return jax.device_put(array, getattr(leaf, "sharding", None))


def _dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def _sync_directory(directory: Path) -> None:
    """Make a new name in a directory last. Not every system can."""
    try:
        handle = os.open(directory, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
