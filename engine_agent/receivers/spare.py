"""Memory that versions come into, kept from one to the next: making it anew costs more than writing to it.

Promises: nothing is kept that somebody may still read (INV-12: only what an install that ended well gave back); nothing
of another size than is asked for; and, unless the settings say otherwise, nothing where it would be missed.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOM = 4
"""So many times what is kept must be available on the host beside it, where the settings leave it to the agent."""
CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class StagingMemory:
    """An unnamed file, and its mapping."""

    descriptor: int
    mapping: mmap.mmap

    @property
    def size(self) -> int:
        return len(self.mapping)

    def close(self) -> None:
        """What still looks into it (an operation of torch's) keeps the memory until it ends."""
        os.close(self.descriptor)
        with suppress(BufferError):
            self.mapping.close()


def available_bytes() -> int:
    """What this process may still take of the host's memory, by the kernel's own estimate and by its control groups'
    limits; 0 where the kernel does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        place = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
    except (OSError, ValueError, StopIteration):
        return 0
    groups = [CGROUPS / place, *(CGROUPS / place).parents]
    return min([found, *(_left(g) for g in groups if g.is_relative_to(CGROUPS))])


def _left(group: Path) -> int:
    """Of a control group's limit; endless where it has none."""
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return 1 << 62
    return 1 << 62 if limit == "max" else max(0, int(limit) - used)


class Spare:
    """Memory that nobody reads any more, kept for the next version of the same size. Thread-safe."""

    def __init__(self, *, wanted: bool | None, available: Callable[[], int] = available_bytes) -> None:
        """Not `wanted`: nothing is ever kept. None: what there is plenty of room for."""
        self._wanted = wanted
        self._available = available
        self._memory: StagingMemory | None = None
        self._guard = threading.Lock()

    def take(self, size: int) -> StagingMemory | None:
        """Of just that size; what is of another is let go of."""
        memory = self._swap(None)
        if memory is not None and memory.size != size:
            memory.close()
            return None
        return memory

    def give(self, memory: StagingMemory) -> None:
        """The one that was there, or this one where none is wanted, is let go of."""
        old = self._swap(memory)
        if old is not None:
            old.close()

    def close(self) -> None:
        """Let go of it, and of all that is still to come. Idempotent."""
        self._wanted = False
        old = self._swap(None)
        if old is not None:
            old.close()

    def _swap(self, memory: StagingMemory | None) -> StagingMemory | None:
        with self._guard:
            if memory is not None and not self._keeps(memory.size):
                return memory
            old, self._memory = self._memory, memory
            return old

    def _keeps(self, size: int) -> bool:
        return self._available() >= ROOM * size if self._wanted is None else self._wanted
