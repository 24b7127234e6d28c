"""What processes were doing when an update's limit came, kept for people after the update was decided.

Promises bounds in number, size and age: whatever is told, it is never more than these. It decides nothing, and nothing
reads it but people. Times are the caller's, monotonic.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from controlplane.core.versions import UpdateId

MAX_UPDATES = 32
"""The newest told of; a fleet that hangs more often than that a day has others to look at."""
MAX_PROCESSES = 32
"""Of one update."""
MAX_TEXT_LENGTH = 16 * 1024
"""Of one process: some hundred frames."""
MAX_TOTAL_LENGTH = 4 << 20
"""Of all of them together."""
MAX_AGE_SECONDS = 86400.0


@dataclass(frozen=True, slots=True)
class ProcessStacks:
    """Of one process, or why there are none."""

    name: str
    pid: int
    text: str = ""
    problem: str = ""

    @property
    def length(self) -> int:
        return len(self.name) + len(self.text) + len(self.problem)


@dataclass(frozen=True, slots=True)
class Kept:
    """Of one update."""

    at: float
    processes: tuple[ProcessStacks, ...]

    @property
    def length(self) -> int:
        return sum(p.length for p in self.processes)


@dataclass(slots=True)
class StackShelf:
    """All that is kept, in the order in which it was told."""

    _kept: OrderedDict[UpdateId, Kept] = field(default_factory=OrderedDict)

    def put(self, update_id: UpdateId, processes: Iterable[ProcessStacks], now: float) -> None:
        """A process that was told of before is replaced; beyond the limit those that came first stay."""
        before = self.get(update_id, now)
        named = {p.name: p for p in (*before.processes, *map(_cut, processes))}
        self._kept.pop(update_id, None)
        self._kept[update_id] = Kept(now, tuple(named.values())[:MAX_PROCESSES])
        while len(self._kept) > MAX_UPDATES or self.length > MAX_TOTAL_LENGTH:
            self._kept.popitem(last=False)
        self._forget(now)

    def get(self, update_id: UpdateId, now: float) -> Kept:
        """Nothing: none came, or they are too old."""
        self._forget(now)
        return self._kept.get(update_id, Kept(now, ()))

    @property
    def length(self) -> int:
        return sum(kept.length for kept in self._kept.values())

    def _forget(self, now: float) -> None:
        for update_id in [u for u, kept in self._kept.items() if now - kept.at > MAX_AGE_SECONDS]:
            del self._kept[update_id]


def _cut(found: ProcessStacks) -> ProcessStacks:
    return replace(found, text=found.text[:MAX_TEXT_LENGTH])
