"""A file system of its own that can be filled to the last byte: a small tmpfs, which root may mount."""

from __future__ import annotations

import errno
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SIZE = "64k"


class Disk:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self) -> None:
        with self._ballast.open("ab", buffering=0) as file:
            while True:
                try:
                    file.write(bytes(512))
                except OSError as error:
                    if error.errno != errno.ENOSPC:
                        raise
                    return

    def free(self) -> None:
        self._ballast.unlink()


@contextmanager
def small_disk(path: Path) -> Iterator[Disk]:
    """Mounted at `path`, which is made. Skips where nobody may mount."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(path)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, timeout=10)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted: {done.stderr.strip()}")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True, timeout=10)
