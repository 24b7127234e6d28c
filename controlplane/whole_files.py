"""Small files that a reader finds whole: as they were, or as they are to be. Everything here blocks."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str, *, durable: bool = False) -> None:
    """Beside it first, then in its place. `durable`: on the disk when this returns. Two writers of one path are not
    for this. Raises OSError; then what was there is there still."""
    scratch = path.with_suffix(".tmp")
    with scratch.open("w") as file:
        file.write(text)
        if durable:
            file.flush()
            os.fsync(file.fileno())
    scratch.rename(path)
    if durable:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Its names are on the disk when this returns. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
