"""A streaming update at the engine: installed chunk by chunk, as it comes.

Opened → (LayoutArrived) → StreamAdmitted → go → ChunkArrived → Quiesced → ChunkArrived* → BytesVerified →
CommitArrived → CanaryPassed. Ready is said before the first byte, and the first chunk is the start of the install. So
whatever ends the stream before its commit frame, also a writer of a higher term (INV-7), ends an install that may have
touched weights: poison, unless nothing was touched yet (INV-4). The commit frame is compared before the install is
brought to its end (INV-3).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.core import errors as e
from controlplane.core.assembly import Assembly
from controlplane.core.engine_events import (
    ChunkArrived,
    CutStreaming,
    Effect,
    Opened,
    Report,
    SendReady,
    StartStreaming,
    StreamAdmitted,
    Update,
    Verify,
)
from controlplane.core.engine_state import Stage

if TYPE_CHECKING:
    from controlplane.core.engine_account import EngineAccount
    from controlplane.core.engine_core import EngineCore

STREAMING = "streaming"
"""The capability."""


def check_open(core: EngineAccount, event: Opened) -> None:
    """Raises UnsupportedByEngine: it installs whole versions only, or a delta was to be streamed."""
    if not event.streaming:
        return
    if STREAMING not in core.capabilities:
        raise e.UnsupportedByEngine(engine_id=core.state.engine_id, what="updates installed as they come (streaming)")
    if event.base is not None:
        raise e.UnsupportedByEngine(engine_id=core.state.engine_id, what="deltas installed as they come (streaming)")


def admitted(core: EngineCore, event: StreamAdmitted) -> list[Effect]:
    """Ready: until the first chunk an end costs nothing."""
    update = core._receiving(event.stream)
    if not update.streaming or update.assembly is None:
        raise e.FrameOutOfOrder(expected="the layout of a streaming update", got="its admission")
    core._progress(update, Stage.READY)
    return [SendReady(event.stream), Report()]


def chunk_arrived(core: EngineCore, update: Update, assembly: Assembly, event: ChunkArrived) -> list[Effect]:
    """The first one starts the install. Each is judged by its writer's term (INV-7)."""
    first = not core.state.installing
    if first and (core.state.progress is None or core.state.progress.stage is not Stage.READY):
        raise e.FrameOutOfOrder(expected="ready", got=f"chunk {event.index}")
    if update.verified:
        raise e.FrameOutOfOrder(expected="commit", got=f"chunk {event.index}")
    fence = core._fence(update.writer_term, by_coordinator=update.by_coordinator)
    if fence is not None:
        raise fence
    completed = assembly.add(event.index, event.records, event.buffer_bytes, last=event.last)
    verify = Verify(event.stream, tuple(completed), assembly.complete)
    if not first:
        core._progress(update, Stage.INSTALLING)
        return [verify]
    core._begin_install(update)
    return [Report(), StartStreaming(event.stream, update), verify]


def cut(update: Update, error: e.WeightplaneError) -> list[Effect]:
    """The stream ended in mid-install. The install says what it touched: then it is decided (INV-4)."""
    update.cut = True
    return [CutStreaming(update.stream, error)]
