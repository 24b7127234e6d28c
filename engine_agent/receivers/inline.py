"""Inline: bytes come inside the stream's messages and are copied once, into memory of the agent's own."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from controlplane.core.assembly import Record
from controlplane.core.errors import FrameInvalid
from engine_agent.engine import StagedPart, StagedWeights
from engine_agent.receivers.port import Buffer, require_open
from engine_agent.receivers.staging import Staging


class InlineReceiver:
    """By copy: a chunk's memory at the sender is free as soon as it was placed."""

    releases_at_once = True
    by_chunk = False

    def __init__(self, staging: Staging, *, keeps: bool = True) -> None:
        """The room is closed with this. Not `keeps`: what was installed is forgotten."""
        self.keeps = keeps
        self.quick = not staging.patched  # the first chunk of a delta waits for a copy of the base
        self._staging = staging
        self._in_use = threading.Lock()

    def place(self, records: Sequence[Record], buffers: Sequence[Buffer]) -> None:
        if len(buffers) != 1 or buffers[0].inline is None:
            raise FrameInvalid("Chunk", "buffers", "the inline transport has its bytes in one buffer")
        self._staging.fill(self._in_use)
        with self._in_use:
            require_open(self._staging.closed)
            self._staging.copy(records, memoryview(buffers[0].inline))

    def check(self, tensor: int, expected: bytes) -> None:
        with self._in_use:
            require_open(self._staging.closed)
            self._staging.check(tensor, expected)

    def staged(self, label: str) -> StagedWeights:
        return self._staging.staged(label)

    def part(self, tensors: Sequence[int]) -> StagedPart:
        return self._staging.part(tensors)

    def forget(self, tensors: Sequence[int]) -> None:
        with self._in_use:
            require_open(self._staging.closed)
            self._staging.forget(tensors)

    def installed(self) -> None:
        self._staging.installed = True

    def close(self) -> None:
        with self._in_use:
            self._staging.close()
