"""Files of shared memory that stay mapped from one update to the next.

Mapping a segment anew costs a fault for each of its pages, inside the pause where a worker does it: a third of what the
load itself takes. A trainer writes every version into the same segment, so one mapping serves all of them.

Promises: what is taken is the file that was named, by device, inode and size; only the files of the update before are
kept; one whose name was removed is let go within `GONE_SECONDS`, so a dead trainer's segment does not fill the memory.
A private mapping that somebody wrote into is never kept: its pages would hide the sender's next bytes.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass

GONE_SECONDS = 5.0
"""How often it is looked whether a kept file has a name still."""
PAGEMAP_ENTRY_BYTES = 8
PAGEMAP_PIECE = 1 << 20
"""Entries read at once: 8 MiB."""
IN_MEMORY = 3 << 62
"""Present, or swapped out."""
OF_THE_FILE = 1 << 61


@dataclass(frozen=True, slots=True)
class MappedFile:
    """One file, whole."""

    descriptor: int
    map: mmap.mmap
    key: tuple[int, int]
    """Device and inode."""

    @property
    def size(self) -> int:
        return len(self.map)

    def close(self) -> None:
        """Raises BufferError: something still looks into it; nothing is closed then."""
        self.map.close()
        os.close(self.descriptor)


class KeptMaps:
    """For use by several threads."""

    def __init__(self, *, private: bool = False) -> None:
        """`private`: writable, and what is written stays here."""
        self._private = private
        self._kept: dict[tuple[int, int], MappedFile] = {}
        self._lock = threading.Lock()
        self._watch: threading.Thread | None = None
        self._closed = threading.Event()

    def take(self, descriptor: int) -> MappedFile:
        """The file, mapped; the descriptor is this side's from here on. Raises OSError, ValueError: it cannot be
        mapped; the descriptor is closed then."""
        info = os.fstat(descriptor)
        key = (info.st_dev, info.st_ino)
        with self._lock:
            kept = self._kept.pop(key, None)
        if kept is not None and kept.size == info.st_size:
            os.close(descriptor)
            return kept
        if kept is not None:
            kept.close()
        try:
            return MappedFile(descriptor, self._map(descriptor), key)
        except BaseException:
            os.close(descriptor)
            raise

    def give_back(self, files: Iterable[MappedFile]) -> None:
        """An update is over, and nobody looks into these. They stay mapped in place of those that were kept before."""
        stay: dict[tuple[int, int], MappedFile] = {}
        go = [file for file in files if not self._may_stay(file) or stay.setdefault(file.key, file) is not file]
        with self._lock:
            if self._closed.is_set():
                stay, go = {}, [*go, *stay.values()]
            if stay:
                go += self._kept.values()
                self._kept = stay
                self._begin_watch()
        for file in go:
            file.close()

    def drop_gone(self) -> None:
        """Let go of every file that has no name any more."""
        with self._lock:
            gone = [file for file in self._kept.values() if not _named(file)]
            for file in gone:
                del self._kept[file.key]
        for file in gone:  # unmapping a large one takes a while, and nobody who takes another waits for it
            file.close()

    def close(self) -> None:
        """Let go of everything; what is given back later is let go of too."""
        with self._lock:
            self._closed.set()
            kept, self._kept = self._kept, {}
        for file in kept.values():
            file.close()

    def _map(self, descriptor: int) -> mmap.mmap:
        if self._private:
            return mmap.mmap(descriptor, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        return mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)

    def _may_stay(self, file: MappedFile) -> bool:
        return not self._closed.is_set() and _named(file) and not (self._private and written_into(file.map))

    def _begin_watch(self) -> None:
        if self._watch is None:
            self._watch = threading.Thread(target=self._drop_for_ever, name="weightplane-kept-maps", daemon=True)
            self._watch.start()

    def _drop_for_ever(self) -> None:
        while not self._closed.wait(GONE_SECONDS):
            self.drop_gone()


def _named(file: MappedFile) -> bool:
    return os.fstat(file.descriptor).st_nlink > 0


def written_into(private: mmap.mmap) -> bool:
    """Whether a page of a private mapping is no longer the file's, by the kernel's own account. True where the kernel
    does not say."""
    import numpy as np  # the agent beside an in-memory engine has none, and maps nothing privately

    first = np.frombuffer(private, dtype=np.uint8).ctypes.data // mmap.PAGESIZE
    count = -(-len(private) // mmap.PAGESIZE)
    try:
        pages = os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        for done in range(0, count, PAGEMAP_PIECE):
            size = min(PAGEMAP_PIECE, count - done) * PAGEMAP_ENTRY_BYTES
            told = os.pread(pages, size, (first + done) * PAGEMAP_ENTRY_BYTES)
            entries = np.frombuffer(told, dtype=np.uint64)
            own = (entries & np.uint64(IN_MEMORY) != 0) & (entries & np.uint64(OF_THE_FILE) == 0)
            if len(told) != size or own.any():
                return True
    except OSError:
        return True
    finally:
        os.close(pages)
    return False
