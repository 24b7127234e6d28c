"""Where a rank exports its chunks to: the whole version, or a ring of two chunks.

Promises: in a ring the bytes of a chunk are overwritten only after whoever reads them has let them go (INV-12): chunk k
waits for chunk k - 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from trainer_agent.chunking import ALIGNMENT_BYTES, SegmentPlan

RING_CHUNKS = 2
"""One is filled while the other travels."""
COPIED_BYTES = 16 * 1024 * 1024
"""Of a chunk that the agent copies out of a ring, at most: what was just written is still in the processor's cache when
it is read, and of 64 MiB it is not."""
NOTHING = -1
"""In place of the number of a chunk that somebody reads."""


class Place(Protocol):
    """Named memory of this host, such as a shared-memory segment."""

    name: str
    memory: memoryview


class ExportMemory(Protocol):
    """Room for chunks."""

    memory: memoryview

    def place(self, index: int) -> int:
        """Where chunk `index` starts; its room may be written when this returns. In the order of the chunks."""
        ...


class WholeMemory:
    """Every chunk has room of its own."""

    def __init__(self, plan: SegmentPlan, memory: memoryview) -> None:
        self.memory = memory
        self._plan = plan

    def place(self, index: int) -> int:
        return self._plan.chunks[index].start


class RingMemory:
    """Two rooms, taken in turn."""

    def __init__(self, plan: SegmentPlan, memory: memoryview, wait_free: Callable[[int], None]) -> None:
        """`wait_free(k)` returns when nobody reads chunk k any more, or raises."""
        self.memory = memory
        self._room = room_bytes(plan)
        self._wait_free = wait_free

    def place(self, index: int) -> int:
        if index >= RING_CHUNKS:
            self._wait_free(index - RING_CHUNKS)
        return index % RING_CHUNKS * self._room


def room_bytes(plan: SegmentPlan) -> int:
    """Room that any chunk of the plan fits into."""
    largest = max(chunk.end - chunk.start for chunk in plan.chunks)
    return max(-(-largest // ALIGNMENT_BYTES) * ALIGNMENT_BYTES, ALIGNMENT_BYTES)


def ring_bytes(plan: SegmentPlan) -> int:
    """Size of a ring."""
    return RING_CHUNKS * room_bytes(plan)
