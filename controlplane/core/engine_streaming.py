"""A streaming update at the engine: installed chunk by chunk, as it comes.

Opened → (LayoutArrived) → StreamAdmitted → go → ChunkArrived → Quiesced → ChunkArrived* → BytesVerified →
CommitArrived → CanaryPassed. Ready is said before the first byte, and the first chunk is the start of the install. So
whatever ends the stream before its commit frame, also a writer of a higher term (INV-7), ends an install that may have
touched weights: poison, unless nothing was touched yet (INV-4). The commit frame is compared before the install is
brought to its end (INV-3).
"""

from __future__ import annotations

from controlplane.core import errors as e
from controlplane.core.assembly import Assembly
from controlplane.core.engine_effects import CutStreaming, Effect, Report, SendReady, StartStreaming, Verify
from controlplane.core.engine_events import ChunkArrived, StreamAdmitted
from controlplane.core.engine_installs import Installs
from controlplane.core.engine_state import Stage
from controlplane.core.engine_update import Update

STREAMING = "streaming"
"""The capability."""


class Streaming(Installs):
    """What a streaming update's frames mean where they mean something else than a staged one's."""

    def _stream_admitted(self, event: StreamAdmitted) -> list[Effect]:
        """Ready: until the first chunk an end costs nothing."""
        update = self._receiving(event.stream)
        if not update.streaming or update.assembly is None:
            raise e.FrameOutOfOrder(expected="the layout of a streaming update", got="its admission")
        self._progress(update, Stage.READY)
        return [SendReady(event.stream), Report()]

    def _streamed_chunk_arrived(self, update: Update, assembly: Assembly, event: ChunkArrived) -> list[Effect]:
        """The first one starts the install. Each is judged by its writer's term (INV-7)."""
        first = not self.state.installing
        if first and (self.state.progress is None or self.state.progress.stage is not Stage.READY):
            raise e.FrameOutOfOrder(expected="ready", got=f"chunk {event.index}")
        if update.verified:
            raise e.FrameOutOfOrder(expected="commit", got=f"chunk {event.index}")
        fence = self._fence(update.writer_term, by_coordinator=update.by_coordinator)
        if fence is not None:
            raise fence
        completed = assembly.add(event.index, event.records, event.buffer_bytes, last=event.last)
        verify = Verify(event.stream, tuple(completed), assembly.complete)
        if not first:
            self._progress(update, Stage.INSTALLING)
            return [verify]
        self._begin_install(update)
        return [Report(), StartStreaming(event.stream, update), verify]


def cut(update: Update, error: e.WeightplaneError) -> list[Effect]:
    """The stream ended in mid-install. The install says what it touched: then it is decided (INV-4)."""
    update.cut = True
    return [CutStreaming(update.stream, error)]
