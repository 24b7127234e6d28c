"""weightplane.v1.Lifecycle: holds and status. Nothing here can change a version (INV-2)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

import structlog

from controlplane import stacks
from controlplane.core import engine_events as events
from controlplane.core.access import ANY, Role
from controlplane.core.engine_state import Hold, HoldKind
from controlplane.core.errors import IdentityMismatch, InvalidRequest, UnsupportedByEngine, WrongIncarnation, WrongRun
from controlplane.core.names import TRAINERS, trainer_owner
from controlplane.core.versions import DeviceTurn, Term
from controlplane.rpc.codec import pause_from_proto, stacks_to_proto
from controlplane.rpc.engine_codec import conditions_to_proto, refusal_to_proto, state_to_proto
from controlplane.rpc.security import caller
from engine_agent.life import commands
from engine_agent.life.engine_life import EngineLife, EngineLifeHolder
from weightplane.v1 import engine_pb2, lifecycle_pb2, lifecycle_pb2_grpc

log = structlog.get_logger(__name__)

_Command = (
    lifecycle_pb2.PauseGenerationRequest
    | lifecycle_pb2.ResumeGenerationRequest
    | lifecycle_pb2.SleepRequest
    | lifecycle_pb2.WakeUpRequest
    | lifecycle_pb2.DrainRequest
    | lifecycle_pb2.AbortRequestsRequest
    | lifecycle_pb2.FlushCacheRequest
)


def status_of(life: EngineLife) -> engine_pb2.EngineStatus:
    """The full state now, with the gate and the word as this agent computes them."""
    status = report_of(life)
    status.conditions.extend(conditions_to_proto(life.core.conditions, life.clock_shift))
    return status


def report_of(life: EngineLife) -> engine_pb2.EngineStatus:
    """The same for the coordinator, which makes conditions of its own. Byte for byte the same while nothing changes."""
    core = life.core
    status = state_to_proto(core.state, core.served)
    if core.refused is not None:
        status.refused.CopyFrom(refusal_to_proto(core.refused, life.clock_shift))
    return status


class LifecycleService(lifecycle_pb2_grpc.LifecycleServicer):
    """Serves whichever life the engine has now."""

    def __init__(self, holder: EngineLifeHolder, stop: asyncio.Event) -> None:
        """`stop` ends the agent, and its engine with it."""
        self._holder = holder
        self._stop = stop

    async def PauseGeneration(
        self, request: lifecycle_pb2.PauseGenerationRequest, context: Any
    ) -> lifecycle_pb2.PauseGenerationResponse:
        life = self._fenced(request)
        aborted = await commands.pause(life, request.owner, pause_from_proto(request))
        return lifecycle_pb2.PauseGenerationResponse(status=status_of(life), aborted_requests=aborted)

    async def ResumeGeneration(
        self, request: lifecycle_pb2.ResumeGenerationRequest, context: Any
    ) -> lifecycle_pb2.ResumeGenerationResponse:
        life = self._fenced(request)
        for kind in (HoldKind.OPERATOR, HoldKind.FINISHING, HoldKind.DRAINING):
            life.apply(events.HoldChanged(Hold(kind, request.owner), present=False))
        return lifecycle_pb2.ResumeGenerationResponse(status=status_of(life))

    async def Sleep(self, request: lifecycle_pb2.SleepRequest, context: Any) -> lifecycle_pb2.SleepResponse:
        life = self._fenced(request)
        turn = _turn_of(request, wanted=request.owner.startswith(TRAINERS))
        await life.power.sleep(events.SleepRequested(request.owner, request.level, turn))
        return lifecycle_pb2.SleepResponse(status=status_of(life))

    async def WakeUp(self, request: lifecycle_pb2.WakeUpRequest, context: Any) -> lifecycle_pb2.WakeUpResponse:
        life = self._fenced(request)
        turn = _turn_of(request, wanted=caller().role is Role.TRAINER and caller().name != ANY)
        await life.power.wake(events.WakeRequested(request.owner, request.kv_cache, turn))
        return lifecycle_pb2.WakeUpResponse(status=status_of(life))

    async def Drain(self, request: lifecycle_pb2.DrainRequest, context: Any) -> lifecycle_pb2.DrainResponse:
        life = self._fenced(request)
        life.apply(events.HoldChanged(Hold(HoldKind.DRAINING, request.owner), present=True))
        return lifecycle_pb2.DrainResponse(status=status_of(life))

    async def AbortRequests(
        self, request: lifecycle_pb2.AbortRequestsRequest, context: Any
    ) -> lifecycle_pb2.AbortRequestsResponse:
        life = self._fenced(request)
        ended = commands.abort(life, request.request_ids)
        return lifecycle_pb2.AbortRequestsResponse(status=status_of(life), request_ids=ended)

    async def FlushCache(
        self, request: lifecycle_pb2.FlushCacheRequest, context: Any
    ) -> lifecycle_pb2.FlushCacheResponse:
        life = self._fenced(request)
        await commands.flush(life)
        return lifecycle_pb2.FlushCacheResponse(status=status_of(life))

    async def GetStatus(self, request: lifecycle_pb2.GetStatusRequest, context: Any) -> lifecycle_pb2.GetStatusResponse:
        life = self._of_run(request.run_id)
        return lifecycle_pb2.GetStatusResponse(status=status_of(life), capabilities=sorted(life.core.capabilities))

    async def WatchStatus(
        self, request: lifecycle_pb2.WatchStatusRequest, context: Any
    ) -> AsyncIterator[lifecycle_pb2.WatchStatusResponse]:
        self._of_run(request.run_id)
        async for life in self._holder.follow():
            yield lifecycle_pb2.WatchStatusResponse(status=status_of(life))

    async def Shutdown(self, request: lifecycle_pb2.ShutdownRequest, context: Any) -> lifecycle_pb2.ShutdownResponse:
        state = self._of_run(request.run_id).core.state
        if request.incarnation != state.incarnation:
            raise WrongIncarnation(engine_id=state.engine_id, expected=state.incarnation, got=request.incarnation)
        log.info("told_to_end", peer=context.peer(), reason=request.reason)
        self._stop.set()
        return lifecycle_pb2.ShutdownResponse()

    async def TailLogs(self, request: lifecycle_pb2.TailLogsRequest, context: Any) -> lifecycle_pb2.TailLogsResponse:
        engine_id = self._of_run(request.run_id).core.state.engine_id
        raise UnsupportedByEngine(engine_id=engine_id, what="its output is its own; only trainer agents keep ranks'")

    async def DumpStacks(
        self, request: lifecycle_pb2.DumpStacksRequest, context: Any
    ) -> lifecycle_pb2.DumpStacksResponse:
        life = self._of_run(request.run_id)
        engine_id = life.core.state.engine_id
        processes = {f"engine agent of {engine_id}": os.getpid()}
        others = [pid for pid in (life.facts.pids if life.facts else ()) if pid != os.getpid()]
        processes |= {f"{engine_id}, process {i} of {len(others)}": pid for i, pid in enumerate(others, 1)}
        return stacks_to_proto(await stacks.dump(processes))

    def _of_run(self, run_id: str) -> EngineLife:
        life = self._holder.life
        if run_id != life.core.state.run_id:
            raise WrongRun(expected=life.core.state.run_id, got=run_id)
        return life

    def _fenced(self, request: _Command) -> EngineLife:
        """The life that the request means. Raises WrongRun, WrongIncarnation."""
        life = self._of_run(request.run_id)
        state = life.core.state
        if (request.engine.engine_id, request.engine.incarnation) != (state.engine_id, state.incarnation):
            raise WrongIncarnation(
                engine_id=state.engine_id, expected=state.incarnation, got=request.engine.incarnation
            )
        return life


def _turn_of(request: lifecycle_pb2.SleepRequest | lifecycle_pb2.WakeUpRequest, *, wanted: bool) -> DeviceTurn | None:
    """None: a person asks, who may wake in a trainer's name, and is not fenced (INV-7). A trainer takes and gives back
    devices in its own name. Raises IdentityMismatch, InvalidRequest."""
    principal = caller()
    if principal.role is Role.TRAINER and principal.name != ANY and request.owner != trainer_owner(principal.name):
        raise IdentityMismatch(caller=str(principal), claimed=request.owner)
    if request.HasField("turn"):
        if not request.owner.startswith(TRAINERS):
            raise InvalidRequest(field="turn", problem=f"{request.owner} is no trainer, and has none")
        return DeviceTurn(Term(request.turn.term), request.turn.number)
    if wanted:
        raise InvalidRequest(field="turn", problem=f"{request.owner} is a trainer, and names no turn")
    return None
