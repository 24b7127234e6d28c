"""One in-memory engine that is spoken to by hand: its samples, and the commands of its `Lifecycle`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.cases.samples import PROMPT, LiveSample
from tests.support.checkpoint_fleet import checkpoint_fleet
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.writer import Weights
from weightplane.v1 import (
    fleet_pb2,
    lifecycle_pb2,
    lifecycle_pb2_grpc,
    pause_pb2,
    rollout_pb2,
    rollout_pb2_grpc,
)

KEEP, ABORT, WAIT = pause_pb2.PAUSE_MODE_KEEP, pause_pb2.PAUSE_MODE_ABORT, pause_pb2.PAUSE_MODE_WAIT
PATIENCE = int(PATIENCE_SECONDS)
HELD = 20
"""Tokens at which a sample stands until it is let go."""
LONG = 1000
"""Tokens of a request that does not end by itself in a test."""


@asynccontextmanager
async def one_engine(directory: Path) -> AsyncIterator[LocalFleet]:
    """`e0`, whose tokens are slow enough to be met in mid-sample."""
    async with checkpoint_fleet(directory, 1, {"seconds_per_token": 0.006, "sleep_seconds": 0.05}) as running:
        yield running


async def first_version(fleet: LocalFleet) -> Weights:
    """What the fleet serves as version 1 from now on; the gate is open."""
    pushed = Weights()
    assert (await fleet.push(pushed)).phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    await eventually(lambda: is_open(fleet))
    return pushed


async def is_open(fleet: LocalFleet) -> bool:
    return (await fleet.status("e0")).gate_open


async def sample(fleet: LocalFleet, max_tokens: int, request_id: str = "") -> LiveSample:
    view = await fleet.engine("e0")
    stub: Any = rollout_pb2_grpc.RolloutStub(fleet.channel(view.endpoint))
    request = rollout_pb2.GenerateRequest(
        run_id=RUN,
        model="policy",
        request_id=request_id,
        prompt_token_ids=PROMPT,
        sampling=rollout_pb2.SamplingParams(max_tokens=max_tokens),
    )
    request.wait.FromSeconds(PATIENCE)
    return LiveSample(stub.Generate(request, timeout=2 * PATIENCE))


async def told(fleet: LocalFleet, method: str, request: Any, **fields: Any) -> Any:
    """The answer of one Lifecycle call, in the name of `ann`."""
    view = await fleet.engine("e0")
    stub = lifecycle_pb2_grpc.LifecycleStub(fleet.channel(view.endpoint))
    return await getattr(stub, method)(request(run_id=RUN, engine=view.status.engine, **fields), timeout=PATIENCE)


async def pause(fleet: LocalFleet, **how: Any) -> lifecycle_pb2.PauseGenerationResponse:
    answer = await told(fleet, "PauseGeneration", lifecycle_pb2.PauseGenerationRequest, owner="ann", **how)
    assert isinstance(answer, lifecycle_pb2.PauseGenerationResponse)
    return answer


async def resume(fleet: LocalFleet) -> None:
    await told(fleet, "ResumeGeneration", lifecycle_pb2.ResumeGenerationRequest, owner="ann")
