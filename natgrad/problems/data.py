"""Published data sets: from the folder `NATGRAD_DATA`, from the user's cache, or downloaded into the cache.

Every file is compared with a checksum."""

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

from natgrad._atomic_write import write_whole
from natgrad._text import track
from natgrad.problems._readers import idx_array

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "natgrad"
BYTES_A_PIECE = 2**16
TIMEOUT_SECONDS = 60


class File(NamedTuple):
    """A published file: its name, the hash of its bytes uncompressed, and the address of the compressed file.

    With `member`, the address is of a compressed archive with the file under that path."""

    name: str
    sha256: str
    address: str
    member: str | None = None

    @property
    def cached_name(self) -> str:
        """The name of the compressed file in the cache."""
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
    """The 10,000 test images of MNIST, one a row, with pixels from 0 to 1."""
    images = idx_array(content(MNIST_TEST_IMAGES), MNIST_TEST_IMAGES.name)
    return images.reshape(-1, 784) / np.float32(255)


def mnist_test_labels() -> np.ndarray:
    """The labels of the 10,000 test images of MNIST."""
    return idx_array(content(MNIST_TEST_LABELS), MNIST_TEST_LABELS.name).astype(np.int32)


def moby_dick() -> str:
    """The text of Moby-Dick, 1.19 million characters."""
    return content(MOBY_DICK).decode()


def in_numbers(text: str) -> tuple[np.ndarray, int]:
    """Characters as indices into the sorted alphabet of the text, and the size of that alphabet."""
    characters = sorted(set(text))
    indices = {character: index for index, character in enumerate(characters)}
    return np.array([indices[character] for character in text], np.int32), len(characters)


def content(file: File) -> bytes:
    """The bytes of a file, from this computer or else downloaded and cached."""
    if path := local_path(file):
        with contextlib.suppress(OSError, EOFError, zlib.error):
            if is_published(raw := gzip.decompress(path.read_bytes()), file):
                return raw
        raise ValueError(f"`{path}` is not `{file.name}` as published: its checksum differs. Remove it and try again.")
    raw = download(file)
    # If the cache is not writable, the file is downloaded again next time.
    with contextlib.suppress(OSError):
        write_whole(CACHE / file.cached_name, gzip.compress(raw, mtime=0))
    return raw


def local_path(file: File) -> Path | None:
    """The path of the file in `NATGRAD_DATA` or in the cache, if it is there."""
    folders = [Path(os.environ["NATGRAD_DATA"])] if os.environ.get("NATGRAD_DATA") else []
    return next((path for folder in [*folders, CACHE] if (path := folder / file.cached_name).is_file()), None)


def download(file: File) -> bytes:
    """The bytes of a file from its address, uncompressed and compared with the checksum."""
    by_hand = (
        f"Put `{file.cached_name}` into `{CACHE}`, or into a folder whose path is in the environment variable "
        "NATGRAD_DATA."
    )
    try:
        with urllib.request.urlopen(file.address, timeout=TIMEOUT_SECONDS) as response:
            pieces = Pieces(response)
            packed = b"".join(track(pieces, f"Downloading {file.name}", show=True))
    except (OSError, http.client.HTTPException) as error:
        raise FileNotFoundError(
            f"`{file.cached_name}` is neither in the folder NATGRAD_DATA nor in the cache, and could not be downloaded "
            f"from {file.address} ({error}). {by_hand}"
        ) from error
    # Python takes a connection that was closed early for the end of the file.
    if len(packed) < pieces.size:
        raise ConnectionError(
            f"Only {len(packed)} of {pieces.size} bytes came from {file.address}; they were discarded. Try again. Or: "
            f"{by_hand}"
        )
    with contextlib.suppress(OSError, EOFError, zlib.error, tarfile.TarError, KeyError):
        if is_published(raw := unpack(packed, file.member), file):
            return raw
    raise ValueError(
        f"The download from {file.address} is not `{file.name}` as published: its checksum differs, so it was "
        f"discarded. Does a proxy change downloads? {by_hand}"
    )


class Pieces:
    """The body of a response in pieces, with a length for the progress bar."""

    def __init__(self, response: Any):
        self.response = response
        self.size = int(response.headers.get("Content-Length") or 0)

    def __len__(self) -> int:
        return -(-self.size // BYTES_A_PIECE)

    def __iter__(self) -> Iterator[bytes]:
        while piece := self.response.read(BYTES_A_PIECE):
            yield piece


def unpack(packed: bytes, member: str | None) -> bytes:
    """The bytes of a compressed file, or of a member of a compressed archive."""
    if member is None:
        return gzip.decompress(packed)
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as archive:
        inside = archive.extractfile(member)
        return b"" if inside is None else inside.read()


def is_published(raw: bytes, file: File) -> bool:
    return hashlib.sha256(raw).hexdigest() == file.sha256
