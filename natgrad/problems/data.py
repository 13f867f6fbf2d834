"""Published data: from the directory named by `NATGRAD_DATA`, from the user's cache, or from where they are published.

Whatever is found is checked, and what is fetched is kept in the cache."""

import contextlib
import gzip
import hashlib
import http.client
import io
import os
import tarfile
import urllib.request
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from natgrad._files import write_whole
from natgrad._text import track
from natgrad.problems._readers import idx_array

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "natgrad"
BYTES_A_PIECE = 2**16
SECONDS = 60


class File(NamedTuple):
    """A file that is kept compressed, where it is published, and what its bytes hash to once they are not.

    What is published is the compressed file, or with `member` a compressed archive that holds it."""

    name: str
    sha256: str
    address: str
    member: str | None = None

    @property
    def kept_name(self) -> str:
        return f"{self.name}.gz"


MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
MNIST_TEST_IMAGES = File(
    "t10k-images-idx3-ubyte",
    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    f"{MNIST}t10k-images-idx3-ubyte.gz",
)
MNIST_TEST_LABELS = File(
    "t10k-labels-idx1-ubyte",
    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    f"{MNIST}t10k-labels-idx1-ubyte.gz",
)
MOBY_DICK = File(
    "moby-dick.txt",
    "fe282a57094ed62e7144fb7c804a9748fc1c909bf3b49d06e7276015f9f67240",
    "https://github.com/stdlib-js/datasets-moby-dick/archive/refs/tags/v0.2.3.tar.gz",
    member="datasets-moby-dick-0.2.3/data/data.txt",
)


def mnist_test_images() -> np.ndarray:
    """The 10,000 test images of MNIST, numbers from 0 to 1, one row each."""
    images = idx_array(content(MNIST_TEST_IMAGES), MNIST_TEST_IMAGES.name)
    return images.reshape(-1, 784) / np.float32(255)


def mnist_test_labels() -> np.ndarray:
    return idx_array(content(MNIST_TEST_LABELS), MNIST_TEST_LABELS.name).astype(np.int32)


def moby_dick() -> str:
    """The book by Melville, 1.19 million characters."""
    return content(MOBY_DICK).decode()


def in_numbers(text: str) -> tuple[np.ndarray, int]:
    """A text in numbers of its characters, and how many different ones it has."""
    characters = sorted(set(text))
    numbers = {character: number for number, character in enumerate(characters)}
    return np.array([numbers[character] for character in text], np.int32), len(characters)


def content(file: File) -> bytes:
    """The bytes of a file that is here, or else fetched and kept."""
    if path := found(file):
        with contextlib.suppress(OSError, EOFError, zlib.error):
            if is_published(raw := gzip.decompress(path.read_bytes()), file):
                return raw
        raise ValueError(f"`{path}` is not `{file.name}` as published: its checksum differs. Remove it and try again.")
    raw = fetched(file)
    # Without a cache that can be written to, the file is fetched again next time.
    with contextlib.suppress(OSError):
        write_whole(CACHE / file.kept_name, gzip.compress(raw, mtime=0))
    return raw


def found(file: File) -> Path | None:
    """Where the file is on this machine, if it is."""
    folders = [Path(os.environ["NATGRAD_DATA"])] if os.environ.get("NATGRAD_DATA") else []
    return next((path for folder in [*folders, CACHE] if (path := folder / file.kept_name).is_file()), None)


def fetched(file: File) -> bytes:
    by_hand = (
        f"Put `{file.kept_name}` into `{CACHE}`, or into a directory of your own and its path into the environment "
        "variable NATGRAD_DATA."
    )
    try:
        with urllib.request.urlopen(file.address, timeout=SECONDS) as response:
            pieces = Pieces(response)
            packed = b"".join(track(pieces, f"Fetching {file.name}", show=True))
    except (OSError, http.client.HTTPException) as error:
        raise FileNotFoundError(
            f"`{file.kept_name}` is neither in the directory named by NATGRAD_DATA nor in the cache, and could not be "
            f"fetched from {file.address} ({error}). {by_hand}"
        ) from error
    if len(packed) < pieces.size:
        raise ConnectionError(
            f"Only {len(packed)} of {pieces.size} bytes came from {file.address}, and none were kept. Try again. Or: "
            f"{by_hand}"
        )
    with contextlib.suppress(OSError, EOFError, zlib.error, tarfile.TarError, KeyError):
        if is_published(raw := unpacked(packed, file.member), file):
            return raw
    raise ValueError(
        f"What came from {file.address} is not `{file.name}` as published: its checksum differs, so it was not kept. "
        f"Is a proxy in between? {by_hand}"
    )


class Pieces:
    """What a response brings, piece by piece, which has a length so that progress can be shown."""

    def __init__(self, response: Any):
        self.response = response
        self.size = int(response.headers.get("Content-Length") or 0)

    def __len__(self) -> int:
        return -(-self.size // BYTES_A_PIECE)

    def __iter__(self) -> Iterator[bytes]:
        while piece := self.response.read(BYTES_A_PIECE):
            yield piece


def unpacked(packed: bytes, member: str | None) -> bytes:
    if member is None:
        return gzip.decompress(packed)
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
        inside = archive.extractfile(member)
        return b"" if inside is None else inside.read()


def is_published(raw: bytes, file: File) -> bool:
    return hashlib.sha256(raw).hexdigest() == file.sha256
