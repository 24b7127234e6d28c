"""Asking the coordinator for an update, and giving one up: the two calls around a push.

Promises: an update that began while the push was failing is given up all the same; one that was begun already is
never taken for a new one.
"""

from __future__ import annotations

import asyncio
import uuid

import grpc
import structlog

from controlplane.core.errors import DeadlineExceeded, WeightplaneError
from controlplane.rpc.errors import from_rpc_error
from trainer_agent.agent import reasons
from trainer_agent.agent.session import FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS, PERSON_SECONDS
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc

log = structlog.get_logger(__name__)

RPC_SECONDS = 5.0
"""Longest single call to the coordinator."""
ABORT_RPC_SECONDS = 2.0
"""Ranks wait for the news that one of them is gone; the coordinator gets so long to take the abort."""

_abandoned: set[asyncio.Task[None]] = set()
"""Keeps the tasks alive that give up what was begun too late; each ends within two calls."""


async def begin_update(
    fleet: fleet_pb2_grpc.FleetAsyncStub, request: fleet_pb2.BeginUpdateRequest, deadline: float, *, first: bool
) -> fleet_pb2.BeginUpdateResponse:
    """Ask until it is granted, refused for good, or too late. The request id makes repeats safe.

    Raises:
        NoEngines, StaleTerm, DeadlineExceeded and whatever else the coordinator refuses with.
    """
    loop = asyncio.get_running_loop()
    started, pause, renewed = loop.time(), FIRST_BACKOFF_SECONDS, False
    while True:
        try:
            return await fleet.BeginUpdate(request, timeout=RPC_SECONDS)
        except grpc.aio.AioRpcError as broken:
            error = from_rpc_error(broken)
        answer = reasons.begin(error, enough_before=not first, renewed=renewed)
        if answer is reasons.Begin.END:
            raise error
        if answer is reasons.Begin.ANEW:
            log.warning("request_used_up", request_id=request.request_id, reason=error.reason, cause=str(error))
            request.request_id, renewed = uuid.uuid4().hex, True
            continue
        if loop.time() + pause > deadline:
            waited = round(loop.time() - started, 1)
            raise DeadlineExceeded(phase="begin", waited_for=f"the coordinator ({error})", waited_seconds=waited)
        person = reasons.waits_for_a_person(error)
        tell = log.warning if person else log.info
        tell("begin_waits", reason=error.reason, cause=str(error))
        await asyncio.sleep(pause)
        pause = min(pause * 2, PERSON_SECONDS if person else MAX_BACKOFF_SECONDS)


async def abort_update(
    fleet: fleet_pb2_grpc.FleetAsyncStub, request: fleet_pb2.AbortUpdateRequest
) -> fleet_pb2.UpdateState | None:
    """Give an update up; its state after that, or None if the coordinator did not say.

    A refusal because GO was given is a state too: the caller's watch has it, or will.
    """
    try:
        response = await fleet.AbortUpdate(request, timeout=ABORT_RPC_SECONDS)
    except grpc.aio.AioRpcError as broken:
        error = from_rpc_error(broken)
        log.info("abort_not_taken", update_id=request.update_id, reason=error.reason, cause=str(error))
        if error.reason == "FRAME_OUT_OF_ORDER":
            return fleet_pb2.UpdateState(update_id=request.update_id, phase=fleet_pb2.UPDATE_PHASE_GO)
        return None
    return response.state


def abandon(
    fleet: fleet_pb2_grpc.FleetAsyncStub,
    begin: asyncio.Task[fleet_pb2.BeginUpdateResponse],
    request: fleet_pb2.AbortUpdateRequest,
) -> None:
    """Give up whatever `begin` still brings, without making anyone wait for it."""
    task = asyncio.create_task(_abandon(fleet, begin, request))
    _abandoned.add(task)
    task.add_done_callback(_abandoned.discard)


async def _abandon(
    fleet: fleet_pb2_grpc.FleetAsyncStub,
    begin: asyncio.Task[fleet_pb2.BeginUpdateResponse],
    request: fleet_pb2.AbortUpdateRequest,
) -> None:
    try:
        async with asyncio.timeout(RPC_SECONDS):
            request.update_id = (await begin).update_id
        await abort_update(fleet, request)
    except (TimeoutError, WeightplaneError):
        # It was refused, or lapses at the coordinator by its own limit.
        log.info("late_begin_dropped", reason=request.reason)
