"""Files that may be replaced while we run: read again when they changed, and only if what came is good.

Promises that a file which is half written, broken or gone leaves what was read before in force, with an error in the
log. Nothing of a file's content is ever logged.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

log = structlog.get_logger(__name__)

T = TypeVar("T")
Stamp = tuple[tuple[int, int, int], ...]


def stamp(paths: Sequence[Path]) -> Stamp:
    """Differs once one of them was replaced or written. Raises OSError."""
    found = [os.stat(path) for path in paths]
    return tuple((s.st_mtime_ns, s.st_size, s.st_ino) for s in found)


class Reread(Generic[T]):
    """What `read` makes of some files, as they are now. Any thread may ask."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], T]) -> None:
        """Reads them. Raises what `read` raises."""
        self._paths = tuple(paths)
        self._read = read
        self._lock = threading.Lock()
        self._stamp = stamp(self._paths)
        self._value = read()
        self.reads = 1
        """How often they were taken: grows with each change."""

    def get(self) -> T:
        with self._lock:
            try:
                now = stamp(self._paths)
                if now != self._stamp:
                    self._take(now)
            except (OSError, ValueError) as error:
                self._complain(error)
            return self._value

    def _take(self, now: Stamp) -> None:
        value = self._read()
        if stamp(self._paths) != now:  # written meanwhile: the next call looks again
            return
        self._value, self._stamp, self._complained = value, now, False
        self.reads += 1
        log.info("files_reread", files=[str(path) for path in self._paths])

    _complained = False

    def _complain(self, error: Exception) -> None:
        """Once for each fault: a handshake must not fill the log."""
        if not self._complained:
            log.error("files_not_reread", files=[str(path) for path in self._paths], cause=str(error))
        self._complained = True
