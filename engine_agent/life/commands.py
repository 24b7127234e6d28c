"""What people ask of a running engine beside its updates: pause it, end requests, empty its caches.

Promises: each returns when what was asked for has come about, and goes to its end once begun, whoever waits; none can
change a version (INV-2), and none opens a gate. A pause that lets requests finish lets updates come meanwhile, as any
pause does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from contextlib import suppress

import structlog

from controlplane.core import engine_events as events
from controlplane.core.engine_state import Hold, HoldKind, Life, Residency
from controlplane.core.errors import DeadlineExceeded, EngineAsleep, EngineNotReady, some
from controlplane.core.pauses import PauseMode, PausePolicy
from controlplane.core.sample_spans import PAUSED
from controlplane.rpc.tasks import to_the_end
from engine_agent.life.engine_life import EngineLife

NAMES_SHOWN = 10
log = structlog.get_logger(__name__)


async def pause(life: EngineLife, owner: str, how: PausePolicy) -> int:
    """Keep the gate shut until its owner's word; the number of requests that were aborted. Raises EngineDied."""
    return await to_the_end(_pause(life, owner, how))


def abort(life: EngineLife, names: Collection[str]) -> list[str]:
    """End the requests that their callers named so, or all if none is named: each with its tokens and spans (R4)."""
    return life.requests.abort(names or None)


async def flush(life: EngineLife) -> None:
    """Empty every cache. Raises EngineNotReady, EngineAsleep, EngineDied, DeadlineExceeded."""
    state = life.core.state
    if state.life is not Life.RUNNING:
        raise EngineNotReady(engine_id=state.engine_id, holds=state.life.value)
    if state.residency is not Residency.AWAKE:
        raise EngineAsleep(engine_id=state.engine_id, missing="the KV cache is")
    await to_the_end(_flush(life))


async def _flush(life: EngineLife) -> None:
    try:
        async with life.gate.standing_still():
            await life.engine.clear_caches()
    except DeadlineExceeded as late:  # once, and by name: nothing is gained by asking again while they run
        waited_for = (
            f"{late.waited_for}, with {len(life.requests)} requests: {some(life.requests.names, most=NAMES_SHOWN)}"
        )
        raise DeadlineExceeded(late.phase, waited_for, late.waited_seconds) from late
    log.info("caches_flushed", live_requests=len(life.requests))


async def _pause(life: EngineLife, owner: str, how: PausePolicy) -> int:
    operator, finishing = Hold(HoldKind.OPERATOR, owner), Hold(HoldKind.FINISHING, owner)
    mode = how.mode
    if mode is PauseMode.WAIT:
        life.apply(events.HoldChanged(finishing, present=True))
        with suppress(TimeoutError):
            async with asyncio.timeout(how.wait_seconds):
                await life.requests.none_left()
        if finishing not in life.core.state.holds:
            return 0  # its owner resumed meanwhile
        mode = how.fallback
    life.apply(events.HoldChanged(operator, present=True))
    life.apply(events.HoldChanged(finishing, present=False))
    if mode is not PauseMode.ABORT or not len(life.requests):
        return 0
    async with life.gate.standing_still():
        resumed = operator not in life.core.state.holds  # its owner's word came while an install was waited for
        return 0 if resumed else len(life.requests.abort(why=PAUSED))
