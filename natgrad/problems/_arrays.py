"""Arrays in files: archives of NumPy, and the IDX format of MNIST."""

import gzip
import math
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from natgrad.problems._columns import FILL_IN, Source, check_name, check_names, finite, leave_out

IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


def file_bytes(path: Path) -> bytes:
    """What is in a file, decompressed if its name ends in `.gz`."""
    raw = path.read_bytes()
    if path.suffix != ".gz":
        return raw
    try:
        return gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(
            f"`{path}` ends in `.gz`, but cannot be decompressed ({error}). Fetch it again, or rename it if it is not "
            "compressed."
        ) from error


def idx_array(raw: bytes, where: str) -> np.ndarray:
    """The array of an IDX file: two zeros, a type, the number of axes, their lengths, the entries."""
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in IDX_TYPES:
        raise ValueError(
            f"`{where}` does not begin like an IDX file: its first bytes are `{raw[:4].hex(' ')}` instead of `00 00`, "
            "a type and the number of axes. Is it compressed without ending in `.gz`?"
        )
    dtype, axes = np.dtype(IDX_TYPES[raw[2]]), raw[3]
    shape = tuple(int.from_bytes(raw[4 + 4 * k : 8 + 4 * k], "big") for k in range(axes))
    start, size = 4 + 4 * axes, math.prod(shape) * dtype.itemsize
    if len(raw) < start + size:
        raise ValueError(
            f"`{where}` is truncated: an array of shape {shape} takes {start + size} bytes, but the file has only "
            f"{len(raw)}. Fetch it again."
        )
    return np.frombuffer(raw, dtype, math.prod(shape), start).reshape(shape)


def read_idx(path: Path, target: str | None, ignore: Sequence[str]) -> Source:
    """Images of one file, scaled to [0, 1] if they are bytes, and the labels of another."""
    check_names(ignore, (), path)
    labels_path = label_file(path, target)
    images, labels = (idx_array(file_bytes(each), str(each)) for each in (path, labels_path))
    if labels.ndim != 1 or images.ndim < 2 or len(images) != len(labels):
        raise ValueError(
            f"`{path}` has shape {images.shape} and `{labels_path}` has shape {labels.shape}, but images need one axis "
            "more than their labels and the same length. Do the files belong together?"
        )
    is_scaled = images.dtype == np.uint8
    inputs = images.reshape(len(images), -1) / np.float32(255 if is_scaled else 1)
    return Source(inputs, labels, labels_path.name, is_scaled=is_scaled)


def label_file(path: Path, target: str | None) -> Path:
    near = sorted(each.name for each in path.parent.iterdir() if "idx1-ubyte" in each.name)
    there = f" Next to it: {', '.join(f'`{name}`' for name in near)}." if near else ""
    if target is None:
        raise ValueError(f"`{path}` holds only images: name the file of their labels as the target.{there}")
    for each in (Path(target), path.parent / target):
        if each.is_file():
            return each
    raise FileNotFoundError(
        f"There is no file of labels `{target}`, neither in the current directory nor next to `{path}`.{there}"
    )


def read_npz(path: Path, target: str | None, ignore: Sequence[str]) -> Source:
    """The array named by `target`, and as inputs all others of its length."""
    if not zipfile.is_zipfile(path):
        raise ValueError(f"`{path}` is not an archive of arrays. Write it with `np.savez(path, x=..., y=...)`.")
    with np.load(path, allow_pickle=False) as archive:
        target = check_name(target, archive.files, path)
        check_names(ignore, archive.files, path)
        arrays = {name: loaded(archive, name, path) for name in archive.files if name not in ignore or name == target}
    y = arrays.pop(target)
    if y.ndim == 0 or y.size != len(y):
        raise ValueError(
            f"The target `{target}` of `{path}` has shape {y.shape}, but one number for every row is needed. Save each "
            "of its columns as an array of its own."
        )
    shapes = {name: array.shape for name, array in arrays.items()}
    inputs = {name: array for name, array in arrays.items() if array.shape[:1] == y.shape[:1]}
    if shapes and not inputs:
        raise ValueError(
            f"The target `{target}` of `{path}` has {len(y)} rows, but no other array has as many: {shapes}. The rows "
            "must be along the first axis."
        )
    columns = [numeric(array, name, path, leave_out(name)) for name, array in inputs.items()]
    y = y.reshape(-1) if y.dtype.kind in "US" else numeric(y, target, path, FILL_IN)[:, 0].astype(y.dtype)
    x = np.concatenate(columns, axis=1) if columns else np.zeros((len(y), 0))
    return Source(x, y, target, left_out=tuple(sorted(shapes.keys() - inputs.keys())))


def loaded(archive, name: str, path: Path) -> np.ndarray:
    try:
        return archive[name]
    except ValueError as error:
        raise ValueError(
            f"Array `{name}` of `{path}` cannot be read ({error}). Arrays of objects are not loaded, since they can "
            "run code. Save numbers, or leave it out with `--ignore`."
        ) from error


def numeric(array: np.ndarray, name: str, path: Path, remedy: str) -> np.ndarray:
    """An array as columns of finite numbers."""
    if array.dtype.kind not in "biuf":
        raise ValueError(
            f"Array `{name}` of `{path}` is of type `{array.dtype}`, but real numbers are needed. Convert it, or leave "
            "it out with `--ignore`."
        )
    rows = array.reshape(len(array), -1).astype(np.float64)
    return finite(rows, f"Array `{name}` of `{path}`", range(len(rows)), remedy)
