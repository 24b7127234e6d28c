"""The port of the receivers: bytes come in chunk by chunk, are checked, and wait in shared memory for the install.

Nothing here touches the engine. The staged bytes stay readable until `close`, also when their sender dies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from controlplane.core.assembly import Record
from controlplane.core.errors import ChecksumMismatch, UpdateAborted
from controlplane.core.layout import Layout
from controlplane.device_memory.ranges import ExportedRange
from engine_agent.engine import StagedPart, StagedWeights


@dataclass(frozen=True, slots=True)
class Buffer:
    """Where a chunk's bytes lie; see BufferHandle in layout.proto. `inline`, `link_bytes` or a range of `segment`."""

    device_uuid: str
    segment: str = ""
    host_id: str = ""
    offset: int = 0
    byte_count: int = 0
    inline: bytes | memoryview | None = None
    link_bytes: int | None = None
    """So many come over the update's link."""
    device: ExportedRange | None = None
    """Or they lie there, where only the worker of that device can read them."""

    @property
    def size(self) -> int:
        """Bytes of the chunk that it has."""
        if self.inline is not None:
            return len(self.inline)
        if self.device is not None:
            return self.device.byte_count
        return self.byte_count if self.link_bytes is None else self.link_bytes


class Receiver(Protocol):
    """One attempt's bytes. Methods block for as long as a copy or a checksum takes; call them in a thread.

    `close` may come from another thread at any time (a newer writer ends this attempt): it waits for the call that
    runs where that reads a sender's memory, and calls after it raise UpdateAborted.
    """

    releases_at_once: bool
    """The sender may reuse a chunk once `place` returned (INV-12); else only when the update is over."""
    quick: bool
    """A chunk waits for nobody: placing it takes as long as a copy of its bytes."""
    keeps: bool
    """Its bytes are this side's own, and may be kept beyond the update: as the base of a delta."""

    def place(self, records: Sequence[Record], buffers: Sequence[Buffer]) -> None:
        """Take one chunk. Raises SegmentUnreadable, DeviceHandlesMissing, ByteCountMismatch, FrameInvalid."""
        ...

    def check(self, tensor: int, expected: bytes) -> None:
        """Compare the whole tensor's XXH3_64, as it lies here, with the sender's. Raises ChecksumMismatch."""
        ...

    def staged(self, label: str) -> StagedWeights:
        """Everything, for the install. Valid until `close`."""
        ...

    def installed(self) -> None:
        """The version was installed, whole: no worker reads what is staged any more (INV-12)."""
        ...

    def close(self) -> None:
        """Unmap and forget. Idempotent."""
        ...


class PartReceiver(Receiver, Protocol):
    """One whose tensors can be installed before all of them are here."""

    by_chunk: bool
    """Each chunk is handed to the workers as it comes, also one that completes no tensor: they keep what they read."""

    def part(self, tensors: Sequence[int]) -> StagedPart:
        """Some of the tensors, whole and checked. Valid until `forget` or `close`."""
        ...

    def forget(self, tensors: Sequence[int]) -> None:
        """No worker reads these any more: what memory they take on this side goes."""
        ...


def require_open(closed: bool) -> None:
    """Raises UpdateAborted: the attempt was ended while a call was on its way."""
    if closed:
        raise UpdateAborted(update_id="", cause="the update ended meanwhile")


def require_equal(layout: Layout, tensor: int, expected: bytes, got: bytes) -> None:
    """Raises ChecksumMismatch (M3: bytes are verified against what was received)."""
    if got != expected:
        raise ChecksumMismatch(name=layout.tensors[tensor].name, expected=expected.hex(), got=got.hex())
