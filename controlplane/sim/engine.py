"""A model of an engine: its weights are a content digest; installs, sleeping and waking take time and fail."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from controlplane.core.engine_state import Residency
from controlplane.core.layout import content_digest
from controlplane.sim.settings import TENSORS, checksum

INITIAL = b"initial weights"
"""What an engine loads by itself; no version (INV-1: no label found in an engine is adopted)."""
MIXTURE = b"a mixture"
LOST = b"memory that was taken anew"
"""After a sleep that kept nothing: whatever the devices' memory held."""


class InstallEnding(Enum):
    """How an install ends."""

    WORKS = "works"
    NOT_QUIET = "not quiet"
    """Quiescing took too long: not a byte was touched."""
    LOST_QUIETING = "lost while it became quiet"
    """The engine's processes were gone before a byte was touched."""
    UNTOUCHED = "untouched"
    TOUCHED = "touched"
    CANARY = "canary"
    STRANGE = "strange"
    """It works, and what the engine says of the weights is not what others say of them."""
    TIMED_OUT = "timed out"
    DIED = "died"


@dataclass
class ModelEngine:
    """What the engine's processes hold, whatever anybody claims."""

    content: bytes = INITIAL
    heard: bytes = b""
    """What it held when its canary spoke last."""
    running: bool = True
    """The scheduler makes tokens. Fresh engines would, as vLLM's does; the agent's gate keeps requests out."""
    stalled: bool = False
    """Its core answers nothing, and makes nothing."""
    weights_resident: bool = True
    kv_resident: bool = True

    @property
    def residency(self) -> Residency:
        if not self.weights_resident:
            return Residency.ASLEEP
        return Residency.AWAKE if self.kv_resident else Residency.WEIGHTS

    def sleep(self, level: int) -> None:
        """Level 1 keeps the weights aside, level 2 keeps nothing."""
        self.weights_resident = self.kv_resident = False
        if level == 2:
            self.content = LOST

    def wake(self, *, kv: bool) -> None:
        self.weights_resident, self.kv_resident = True, self.kv_resident or kv

    def install_begins(self) -> None:
        self.content = MIXTURE

    def install_worked(self, content: bytes) -> None:
        self.content = content


class Turns:
    """Pieces of work on one engine, one at a time, in the order in which they were asked for: the agent's lock."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._busy = False
        self._looking = False

    @property
    def idle(self) -> bool:
        return not self._busy and not self._waiting

    def take(self, work: Callable[[], None]) -> None:
        """`work` calls `done` when it is over, then or later."""
        self._waiting.append(work)
        self._look()

    def done(self) -> None:
        self._busy = False
        self._look()

    def _look(self) -> None:
        if self._looking:
            return
        self._looking = True
        while self._waiting and not self._busy:
            self._busy = True
            self._waiting.popleft()()
        self._looking = False


@dataclass
class Staged:
    """What really came over one stream: contents by tensor, whatever the frames say of them."""

    chunks: int = 0
    byte_count: int = 0
    contents: dict[int, int] = field(default_factory=dict)
    closed: bool = False

    def digest(self) -> bytes:
        """Content digest of what lies here; empty while a tensor is missing."""
        if len(self.contents) != TENSORS:
            return b""
        return content_digest([checksum(c, t) for t, c in sorted(self.contents.items())])
