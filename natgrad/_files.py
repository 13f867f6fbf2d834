"""Files that are whole or as they were."""

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write a file in a folder, made if need be, under another name first: whoever reads it, or stops this, finds all
    of it or what was there before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    return path
