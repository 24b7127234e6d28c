"""Shared-memory segments that a rank exports its weights into: reused, pre-faulted, never left behind.

Promises:

- A segment is reserved whole when it is made: a full `/dev/shm` is an error that names sizes, not a SIGBUS later.
- It is reused only after the last push ended with certainty that nobody reads it any more (INV-12); otherwise
  it is unlinked and the next push gets a new one. Who still has it mapped keeps what they saw.
- Its owner holds a lock on it for life, so `sweep()` can tell the segments of the dead from those of the living.

Refuses to share a name: segments are created exclusively, mode 0600.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
from pathlib import Path

import structlog

from controlplane.core.errors import LimitExceeded
from trainer_agent.forks import let_go_in_children

log = structlog.get_logger(__name__)

DIRECTORY = Path("/dev/shm")
MAX_RUN_LENGTH = 64
"""Characters of the run's name in a segment's name: names stay below the contract's 200."""
CREATE_ATTEMPTS = 8
"""Tries to make a segment that no sweep catches between its creation and its lock."""
_OURS = re.compile(r"weightplane-.+-[0-9a-f]{12}-r\d+-\d+")
"""Names that ranks give. Other processes of ours keep segments too, under other rules: they are not swept here."""


class Segment:
    """One segment, mapped and locked by this process. `memory` is its bytes, writable."""

    def __init__(self, name: str, descriptor: int, byte_count: int) -> None:
        self.name = name
        self.byte_count = byte_count
        self._descriptor = descriptor
        self._mapping = mmap.mmap(descriptor, byte_count, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        # A forked child must not keep gigabytes of an unlinked segment for as long as it lives.
        self._mapping.madvise(mmap.MADV_DONTFORK)
        self.memory = memoryview(self._mapping)
        let_go_in_children(self)

    def unlink(self) -> None:
        """Take the name away and let go. Readers that have it open keep it until they close it."""
        (DIRECTORY / self.name).unlink(missing_ok=True)
        self._close()

    def abandon(self) -> None:
        """In a forked child: the lock and the memory belong to the parent."""
        self._close()

    def _close(self) -> None:
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        try:
            self.memory.release()
            self._mapping.close()
        except BufferError:
            # A tensor still looks into it; the mapping goes with that tensor.
            log.debug("segment_still_viewed", segment=self.name)


class SegmentNames:
    """Names that no other rank gives, one after the other."""

    def __init__(self, run_id: str, rank: int) -> None:
        self._prefix = f"weightplane-{_safe(run_id)}-{secrets.token_hex(6)}-r{rank}"
        self._given = 0

    def next(self) -> str:
        self._given += 1
        return f"{self._prefix}-{self._given - 1}"


class SegmentPool:
    """The one segment of a rank, through all of its pushes."""

    def __init__(self, run_id: str, rank: int) -> None:
        self._names = SegmentNames(run_id, rank)
        self._segment: Segment | None = None
        self._certain = True
        """Whether nobody can still be reading the segment."""

    def acquire(self, byte_count: int) -> Segment:
        """A segment of at least `byte_count` bytes that nobody reads. Until `settle(True)` it counts as being read.

        Raises:
            LimitExceeded: `/dev/shm` has not that much room.
        """
        if self._segment is not None and (not self._certain or self._segment.byte_count < byte_count):
            self.close()
        if self._segment is None:
            self._segment = create(self._names.next(), byte_count)
        self._certain = False
        return self._segment

    def settle(self, released: bool) -> None:
        """The push ended. Not released: some agent may still read, so the segment is given up (INV-12)."""
        self._certain = released
        if not released:
            self.close()

    def close(self) -> None:
        """Unlink whatever there is. The pool can be used again."""
        if self._segment is not None:
            self._segment.unlink()
        self._segment = None


def create(name: str, byte_count: int) -> Segment:
    """Make, reserve, lock and map a new segment.

    Raises:
        LimitExceeded: `/dev/shm` has not that much room.
        FileExistsError: the name is taken.
    """
    byte_count = max(byte_count, mmap.PAGESIZE)
    for _ in range(CREATE_ATTEMPTS):
        descriptor = os.open(DIRECTORY / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink == 0:
                os.close(descriptor)
                continue  # swept before it was locked
            _reserve(descriptor, byte_count)
            return Segment(name, descriptor, byte_count)
        except BaseException:
            (DIRECTORY / name).unlink(missing_ok=True)
            os.close(descriptor)
            raise
    raise FileExistsError(f"segment {name} was taken away {CREATE_ATTEMPTS} times while it was made")


def sweep() -> list[str]:
    """Unlink the segments whose owner died, and return their names. Those of other users are left alone."""
    dead = [p.name for p in DIRECTORY.iterdir() if _OURS.fullmatch(p.name) and _ownerless(p)]
    if dead:
        log.info("segments_swept", count=len(dead), segments=dead[:5])
    return sorted(dead)


def _ownerless(path: Path) -> bool:
    """Unlinks `path` if nobody holds its lock."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            return False
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _reserve(descriptor: int, byte_count: int) -> None:
    try:
        os.posix_fallocate(descriptor, 0, byte_count)
    except OSError as error:
        free = os.statvfs(DIRECTORY)
        raise LimitExceeded(
            what=f"bytes free in {DIRECTORY} ({error.strerror})", limit=free.f_bavail * free.f_frsize, got=byte_count
        ) from error


def _safe(run_id: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "_", run_id)[:MAX_RUN_LENGTH] or "run"
