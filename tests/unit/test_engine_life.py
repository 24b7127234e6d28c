"""One life of an engine: how an install ended is told to each who asks, whenever, and never for another install."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest

from controlplane.core import engine_events as events
from controlplane.core.assembly import Record
from controlplane.core.engine_state import EngineState, Poisoned
from controlplane.core.errors import DeadlineExceeded, InstallFailed
from controlplane.core.layout import DType, Layout, TensorSpec, content_digest
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, Term, UpdateId, WeightVersion
from controlplane.failpoints import DIRECTORY_VARIABLE
from engine_agent.engine import CanaryReport
from engine_agent.life import EngineLife
from engine_agent.memory_engine import MemoryEngine, MemorySettings
from engine_agent.receivers.inline import InlineReceiver
from engine_agent.receivers.port import Buffer
from engine_agent.remembered import Memory

LAYOUT = Layout((TensorSpec("w", DType.F32, (4,)),))
CHECKSUM = hashlib.sha256(b"x").digest()[:8]
VERSION, UPDATE = WeightVersion(1, Term(1)), UpdateId("u")


async def started(tmp_path: Path, engine: MemoryEngine | None = None) -> EngineLife:
    state = EngineState(RunId("run"), ModelName("policy"), EngineId("e0"), Incarnation("i"))
    life = EngineLife(state, engine or MemoryEngine(MemorySettings(), "e0"), Memory(tmp_path / "e0.json", "run"))
    await life.start()
    life.apply(events.FleetChanged(Term(1), Term(1), frozenset()))
    return life


def commit(life: EngineLife, stream: int) -> None:
    """Everything up to the install's start, as the service does it."""
    head = (RunId("run"), ModelName("policy"), Incarnation("i"), UPDATE, Term(1), VERSION, LAYOUT.digest, 1, 16)
    accept = next(x for x in life.apply(events.Opened(stream, *head)) if isinstance(x, events.Accept))
    if accept.layout_needed:
        life.apply(events.LayoutArrived(stream, LAYOUT))
    receiver = InlineReceiver(LAYOUT)
    life.keep(stream, receiver)
    records = [Record(0, 0, 0, 16, CHECKSUM)]
    life.apply(events.ChunkArrived(stream, VERSION, 0, records, 16))
    receiver.place(records, [Buffer("", inline=bytes(16))])
    life.apply(events.BytesVerified(stream))
    effects = life.apply(events.CommitArrived(stream, VERSION, 1, 16, content_digest([CHECKSUM])))
    life.start_install(next(x for x in effects if isinstance(x, events.StartInstall)))


async def test_inv6_a_failure_is_told_also_to_who_asks_after_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    (tmp_path / "worker.install").write_text("raise")
    life = await started(tmp_path)
    commit(life, 1)
    for _ in range(2):
        with pytest.raises(InstallFailed):
            await asyncio.wait_for(life.outcome(UPDATE), 5)
    await life.end("done")


async def test_inv6_the_same_update_installed_again_is_not_answered_from_the_first_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    life = await started(tmp_path)
    commit(life, 1)
    await asyncio.wait_for(life.outcome(UPDATE), 5)
    life.apply(events.SpansDisagreed("poisoned since"))
    (tmp_path / "worker.install").write_text("raise")
    commit(life, 2)
    with pytest.raises(InstallFailed):
        await asyncio.wait_for(life.outcome(UPDATE), 5)
    await life.end("done")


class SlowCanary(MemoryEngine):
    """Its canary passes its limit once the weights were replaced."""

    async def canary(self) -> CanaryReport:
        raise DeadlineExceeded("canary", "the engine core", 1.0)


async def test_inv4_any_failure_after_the_first_byte_is_poison_also_where_nothing_was_held(tmp_path: Path) -> None:
    life = await started(tmp_path, SlowCanary(MemorySettings(), "e0"))
    commit(life, 1)
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(life.outcome(UPDATE), 5)
    assert isinstance(life.core.state.weights, Poisoned)
    await life.end("done")
