"""Real data sets for benchmarks: from `NATGRAD_DATA`, from the user's cache, or from where they are published."""

import gzip
import hashlib
import os
import pydoc_data.topics
import urllib.request
from pathlib import Path
from typing import NamedTuple

import numpy as np


class File(NamedTuple):
    """A file that is published compressed, and what its bytes hash to once they are not."""

    name: str
    sha256: str
    address: str = "https://ossci-datasets.s3.amazonaws.com/mnist/"


IMAGES = File("t10k-images-idx3-ubyte", "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7")
LABELS = File("t10k-labels-idx1-ubyte", "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2")
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "natgrad"


def mnist_test_images() -> np.ndarray:
    """The 10,000 test images of MNIST, numbers from 0 to 1, one row each."""
    return np.frombuffer(content(IMAGES), np.uint8, offset=16).reshape(-1, 784) / np.float32(255)


def mnist_test_labels() -> np.ndarray:
    return np.frombuffer(content(LABELS), np.uint8, offset=8).astype(np.int32)


def python_reference(length: int) -> tuple[np.ndarray, int]:
    """The beginning of Python's own reference manual, in numbers of characters, and how many different ones it has."""
    text = "".join(pydoc_data.topics.topics.values())[:length]
    characters = sorted(set(text))
    numbers = {character: number for number, character in enumerate(characters)}
    return np.array([numbers[character] for character in text], np.int32), len(characters)


def content(file: File) -> bytes:
    """The bytes of a file that is here, or else fetched and kept."""
    folders = [Path(os.environ["NATGRAD_DATA"])] if "NATGRAD_DATA" in os.environ else []
    for path in (folder / f"{file.name}.gz" for folder in [*folders, CACHE]):
        if path.exists():
            return checked(path.read_bytes(), file, str(path))
    address = f"{file.address}{file.name}.gz"
    try:
        with urllib.request.urlopen(address, timeout=60) as response:
            compressed = response.read()
    except OSError as error:
        raise FileNotFoundError(
            f"`{file.name}.gz` is neither in the directory named by NATGRAD_DATA nor in `{CACHE}`, and could not be "
            f"fetched from {address} ({error}). Put it into one of the two."
        ) from error
    raw = checked(compressed, file, address)
    CACHE.mkdir(parents=True, exist_ok=True)
    (CACHE / f"{file.name}.gz").write_bytes(compressed)
    return raw


def checked(compressed: bytes, file: File, where: str) -> bytes:
    try:
        raw = gzip.decompress(compressed)
    except (OSError, EOFError):
        raw = b""
    if hashlib.sha256(raw).hexdigest() != file.sha256:
        raise ValueError(f"`{where}` is not `{file.name}` as published: its checksum differs. Remove it and try again.")
    return raw
