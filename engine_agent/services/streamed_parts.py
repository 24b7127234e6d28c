"""The stream's side of a streaming install: chunks become parts of whole tensors, installed one after the other.

Promises that a chunk counts as released only when no worker and no later part reads it any more (INV-12).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from controlplane.core import engine_effects as fx
from controlplane.core.assembly import Record
from engine_agent.life.engine_life import EngineLife
from engine_agent.life.streaming import StreamingInstall
from engine_agent.receivers import PartReceiver


class StreamedParts:
    """One stream's. Nothing of the engine is touched before the first `install`."""

    def __init__(self, life: EngineLife, stream: int, receiver: PartReceiver) -> None:
        self._life = life
        self._stream = stream
        self._receiver = receiver
        self._install: StreamingInstall | None = None
        self._partial: set[int] = set()
        """Tensors of which some bytes came, and more will."""

    def began(self, effects: Sequence[fx.Effect]) -> None:
        """What the core made of a chunk: with the first one the install begins."""
        for effect in effects:
            if isinstance(effect, fx.StartStreaming):
                self._install = self._life.installs.start_streaming(effect)

    async def install(self, records: Sequence[Record], complete: Sequence[int]) -> None:
        """A chunk's tensors, checked: returns when those that it completed are in. Raises what ended the install."""
        self._partial = (self._partial | {r.tensor for r in records}) - set(complete)
        if (complete or self._receiver.by_chunk) and self._install is not None:
            await self._install.put(self._receiver.part(complete))
            await asyncio.to_thread(self._receiver.forget, complete)

    @property
    def releases(self) -> bool:
        """Whether every chunk so far may be written again: by reference, a partial tensor is read where it lies."""
        return self._receiver.releases_at_once or not self._partial

    def finish(self) -> None:
        """The commit frame was taken."""
        assert self._install is not None, "chunks came before the commit frame"
        self._install.finish()
