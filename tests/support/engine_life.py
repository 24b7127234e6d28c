"""One life of an in-memory engine without its servers: started, given a version, serving, asked for tokens."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as events
from controlplane.core.assembly import Record
from controlplane.core.engine_state import EngineState
from controlplane.core.layout import DType, Layout, TensorSpec, content_digest
from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, Term, UpdateId, WeightVersion
from engine_agent.life.engine_life import EngineLife
from engine_agent.life.installing import Applied
from engine_agent.life.remembered import Memory
from engine_agent.memory.engine import MemoryEngine, MemorySettings
from engine_agent.receivers.inline import InlineReceiver
from engine_agent.receivers.port import Buffer
from engine_agent.receivers.staging import Staging
from tests.cases.engines import Hand, HandledEngine
from tests.support.eventually import PATIENCE_SECONDS, eventually

LAYOUT = Layout((TensorSpec("w", DType.F32, (4,)),))
CHECKSUM = hashlib.sha256(b"x").digest()[:8]
VERSION, UPDATE = WeightVersion(1, Term(1)), UpdateId("u")


async def started(tmp_path: Path, engine: MemoryEngine | None = None) -> EngineLife:
    state = EngineState(RunId("run"), ModelName("policy"), EngineId("e0"), Incarnation("i"))
    life = EngineLife(
        state, engine or MemoryEngine(MemorySettings(), "e0"), Memory(tmp_path / "e0.json", "run", "policy")
    )
    await life.start()
    life.apply(events.FleetChanged(Term(1), Term(1), frozenset()))
    return life


def commit(life: EngineLife, stream: int, version: WeightVersion = VERSION) -> None:
    """Everything up to the install's start, as the service does it. VERSION's update is UPDATE, 2's is "u2"."""
    update = UPDATE if version == VERSION else UpdateId(f"u{version.number}")
    head = (RunId("run"), ModelName("policy"), Incarnation("i"), update, Term(1), version, LAYOUT.digest, 1, 16)
    accept = next(x for x in life.apply(events.Opened(stream, *head)) if isinstance(x, fx.Accept))
    if accept.layout_needed:
        life.apply(events.LayoutArrived(stream, LAYOUT))
    receiver = InlineReceiver(Staging(LAYOUT))
    life.streams.keep(stream, receiver)
    records = [Record(0, 0, 0, 16, CHECKSUM)]
    life.apply(events.ChunkArrived(stream, version, 0, records, 16))
    receiver.place(records, [Buffer("", inline=bytes(16))])
    life.apply(events.BytesVerified(stream))
    effects = life.apply(events.CommitArrived(stream, version, 1, 16, content_digest([CHECKSUM])))
    life.installs.start(next(x for x in effects if isinstance(x, fx.StartInstall)))


async def serving(tmp_path: Path, hand: Hand | None = None) -> tuple[EngineLife, MemoryEngine]:
    """It holds VERSION and serves it; `hand` is laid on it."""
    engine = HandledEngine(MemorySettings(), "e0", hand or Hand())
    life = await started(tmp_path, engine)
    commit(life, 1)
    await outcome(life)
    life.apply(events.FleetChanged(Term(1), Term(1), frozenset({VERSION})))
    await eventually(lambda: life.open)
    return life, engine


async def outcome(life: EngineLife, update: UpdateId = UPDATE) -> Applied:
    return await asyncio.wait_for(life.installs.outcome(update), PATIENCE_SECONDS)


async def generated(life: EngineLife, max_tokens: int) -> tuple[int, str | None]:
    """Tokens of one request, and how it ended."""
    count, reason = 0, None
    async for part in life.requests.run("r", VERSION, [1, 2, 3], SamplingSettings(max_tokens=max_tokens)):
        count, reason = count + len(part.delta.token_ids), part.delta.finish_reason
    return count, reason
