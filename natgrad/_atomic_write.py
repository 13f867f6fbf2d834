"""Atomic writing of files."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write a file atomically: other processes see the old content or the new, also if this one is interrupted.

    The content is written under another name, and the file is then renamed. Missing folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return path
