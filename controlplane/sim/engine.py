"""A model of an engine: its weights are a content digest, and installs take time and fail in every known way."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from controlplane.core.layout import content_digest
from controlplane.sim.settings import LAYOUT, checksum

INITIAL = b"initial weights"
"""What an engine loads by itself; no version (INV-1: no label found in an engine is adopted)."""
MIXTURE = b"a mixture"


class InstallEnding(Enum):
    """How an install ends."""

    WORKS = "works"
    NOT_QUIET = "not quiet"
    """Quiescing took too long: not a byte was touched."""
    UNTOUCHED = "untouched"
    TOUCHED = "touched"
    CANARY = "canary"
    TIMED_OUT = "timed out"
    DIED = "died"


@dataclass
class ModelEngine:
    """What the engine's processes hold, whatever anybody claims."""

    content: bytes = INITIAL
    running: bool = True
    """The scheduler makes tokens. Fresh engines would, as vLLM's does; the agent's gate keeps requests out."""

    def install_begins(self) -> None:
        self.content = MIXTURE

    def install_worked(self, content: bytes) -> None:
        self.content = content


@dataclass
class Staged:
    """What really came over one stream: contents by tensor, whatever the frames say of them."""

    chunks: int = 0
    byte_count: int = 0
    contents: dict[int, int] = field(default_factory=dict)
    closed: bool = False

    def digest(self) -> bytes:
        """Content digest of what lies here; empty while a tensor is missing."""
        if len(self.contents) != len(LAYOUT.tensors):
            return b""
        return content_digest([checksum(c, t) for t, c in sorted(self.contents.items())])
