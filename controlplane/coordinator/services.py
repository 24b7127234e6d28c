"""The coordinator's services: decode, ask the hub, encode. Decisions are in `controlplane.core.fleet`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import structlog

from controlplane.coordinator import views
from controlplane.coordinator.hub import Hub
from controlplane.core import fleet_events as events
from controlplane.core.access import Role, check_speaks_as
from controlplane.core.engine_state import Refusal
from controlplane.core.errors import FrameOutOfOrder, PeerLost, StaleTerm
from controlplane.core.fleet_records import CheckpointKept, LostRank
from controlplane.core.kept_stacks import ProcessStacks
from controlplane.core.versions import (
    EngineId,
    Incarnation,
    ModelName,
    RunId,
    Term,
    TrainerId,
    UpdateId,
)
from controlplane.rpc.codec import seconds_from_proto, version_from_proto, version_to_proto
from controlplane.rpc.engine_codec import refusal_from_proto, state_from_proto
from controlplane.rpc.plan_codec import (
    FATES_BACK,
    avoided_from_proto,
    base_from_proto,
    engine_place_from_proto,
    load_from_proto,
    plan_to_proto,
    rank_places_from_proto,
    sends_from_proto,
    transport_from_proto,
)
from controlplane.rpc.security import caller
from weightplane.v1 import engine_pb2, fleet_pb2, fleet_pb2_grpc, operator_pb2, operator_pb2_grpc

log = structlog.get_logger(__name__)

HELLO_LIMIT_SECONDS = 10.0
"""A session whose first frame has not come by then is closed."""

_FINAL = (fleet_pb2.UPDATE_PHASE_COMMITTED, fleet_pb2.UPDATE_PHASE_DEGRADED, fleet_pb2.UPDATE_PHASE_FAILED)


class FleetService(fleet_pb2_grpc.FleetServicer):
    """weightplane.v1.Fleet."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def Session(
        self, request_iterator: AsyncIterator[fleet_pb2.SessionRequest], context: Any
    ) -> AsyncIterator[fleet_pb2.SessionResponse]:
        session, outbox = self._hub.new_session()
        reader = asyncio.create_task(self._read(session, request_iterator))
        next_frame = asyncio.ensure_future(outbox.get())
        try:
            while True:
                await asyncio.wait({next_frame, reader}, return_when=asyncio.FIRST_COMPLETED)
                if not next_frame.done():
                    reader.result()  # raises what the reader was refused with
                    return
                yield next_frame.result()
                next_frame = asyncio.ensure_future(outbox.get())
        finally:
            reader.cancel()
            next_frame.cancel()
            self._hub.drop_session(session)
            # However it ended: the agent is silent from now on, unless it said goodbye (then this changes nothing).
            await self._hub.handle(events.SessionEnded(session, goodbye=False))

    async def _read(self, session: int, requests: AsyncIterator[fleet_pb2.SessionRequest]) -> None:
        """Frames of one agent, until its goodbye or its silence."""
        iterator = aiter(requests)
        try:
            async with asyncio.timeout(HELLO_LIMIT_SECONDS):
                hello = await anext(iterator)
        except (TimeoutError, StopAsyncIteration):
            raise PeerLost(peer="agent", cause="no hello came") from None
        await self._hub.handle(_hello_event(session, hello))
        last = hello
        event: events.Event | None = None
        async for frame in iterator:
            if event is not None and frame is last:  # a heartbeat: it says once more what it said
                await self._hub.handle(event)
                continue
            kind = frame.WhichOneof("frame")
            if kind == "goodbye":
                log.info("agent_left", reason=frame.goodbye.reason)
                await self._hub.handle(events.SessionEnded(session, goodbye=True))
                return
            last, event = frame, _status_event(session, frame)
            await self._hub.handle(event)

    async def BeginUpdate(self, request: fleet_pb2.BeginUpdateRequest, context: Any) -> fleet_pb2.BeginUpdateResponse:
        self._check_holder(ModelName(request.model), request.term)
        limit = seconds_from_proto(request.ready_limit) if request.HasField("ready_limit") else None
        update = await self._hub.begin_update(
            events.UpdateRequested(
                update_id=UpdateId(uuid.uuid4().hex),
                request_id=request.request_id,
                run_id=RunId(request.run_id),
                model=ModelName(request.model),
                term=Term(request.term),
                step=request.step if request.HasField("step") else None,
                ready_limit_seconds=limit,
                layout_digest=request.layout_digest,
                byte_count=request.byte_count,
                avoid=tuple(avoided_from_proto(a) for a in request.avoid),
                base=base_from_proto(request.base) if request.HasField("base") else None,
            )
        )
        return fleet_pb2.BeginUpdateResponse(
            update_id=update.update_id, version=version_to_proto(update.version), plan=plan_to_proto(update.plan)
        )

    async def WatchUpdate(
        self, request: fleet_pb2.WatchUpdateRequest, context: Any
    ) -> AsyncIterator[fleet_pb2.WatchUpdateResponse]:
        async for state in self._hub.watch_update(RunId(request.run_id), UpdateId(request.update_id)):
            yield fleet_pb2.WatchUpdateResponse(state=state)
            if state.phase in _FINAL:
                return

    async def AbortUpdate(self, request: fleet_pb2.AbortUpdateRequest, context: Any) -> fleet_pb2.AbortUpdateResponse:
        update_id = UpdateId(request.update_id)
        update = self._hub.core.updates.get(update_id)
        if update is not None:
            self._check_holder(update.model, request.term)
        await self._hub.handle(
            events.AbortRequested(RunId(request.run_id), update_id, Term(request.term), request.reason)
        )
        return fleet_pb2.AbortUpdateResponse(
            state=views.update_state(self._hub.core.updates[update_id], self._hub.clock_shift)
        )

    async def ReportStacks(
        self, request: fleet_pb2.ReportStacksRequest, context: Any
    ) -> fleet_pb2.ReportStacksResponse:
        self._hub.check_run(request.run_id)
        update = self._hub.find_update(UpdateId(request.update_id))
        holder = self._hub.core.trainers.get(update.model)
        present = 0 if holder is None else int(holder.term)
        if request.term != present or update.term != present:  # INV-7
            raise StaleTerm(model=update.model, got=request.term, current=present)
        self._check_holder(update.model, request.term)
        told = [ProcessStacks(p.name, p.pid, p.text, p.problem) for p in request.processes]
        self._hub.stacks.put(update.update_id, told, time.monotonic())
        return fleet_pb2.ReportStacksResponse()

    async def PublishCheckpoint(
        self, request: fleet_pb2.PublishCheckpointRequest, context: Any
    ) -> fleet_pb2.PublishCheckpointResponse:
        kept = _checkpoint(request.checkpoint)
        self._check_holder(kept.model, request.term)
        await self._hub.handle(events.CheckpointPublished(RunId(request.run_id), Term(request.term), kept))
        return fleet_pb2.PublishCheckpointResponse()

    async def RetireCheckpoint(
        self, request: fleet_pb2.RetireCheckpointRequest, context: Any
    ) -> fleet_pb2.RetireCheckpointResponse:
        self._check_holder(ModelName(request.model), request.term)
        await self._hub.handle(
            events.CheckpointRetired(
                RunId(request.run_id), ModelName(request.model), Term(request.term), request.number
            )
        )
        return fleet_pb2.RetireCheckpointResponse()

    async def WatchRoutes(
        self, request: fleet_pb2.WatchRoutesRequest, context: Any
    ) -> AsyncIterator[fleet_pb2.WatchRoutesResponse]:
        model = ModelName(request.model)
        async for routes in self._hub.watch_routes(request.run_id, model, kept=request.include_kept):
            yield routes

    def _check_holder(self, model: ModelName, term: int) -> None:
        """INV-7: a term is its holder's own; who was fenced is told so by the core."""
        holder = self._hub.core.trainers.get(model)
        if holder is not None and holder.term == term:
            check_speaks_as(caller(), Role.TRAINER, holder.trainer_id)


class OperatorService(operator_pb2_grpc.OperatorServicer):
    """weightplane.v1.Operator."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    async def GetFleet(self, request: operator_pb2.GetFleetRequest, context: Any) -> operator_pb2.GetFleetResponse:
        self._hub.check_run(request.run_id)
        return operator_pb2.GetFleetResponse(fleet=await self._hub.fleet_view())

    async def WatchFleet(
        self, request: operator_pb2.WatchFleetRequest, context: Any
    ) -> AsyncIterator[operator_pb2.WatchFleetResponse]:
        self._hub.check_run(request.run_id)
        async for view in self._hub.watch_fleet():
            yield operator_pb2.WatchFleetResponse(fleet=view)

    async def GetStacks(self, request: operator_pb2.GetStacksRequest, context: Any) -> operator_pb2.GetStacksResponse:
        self._hub.check_run(request.run_id)
        update = self._hub.find_update(UpdateId(request.update_id))
        return views.kept_stacks(self._hub.stacks.get(update.update_id, time.monotonic()), self._hub.clock_shift)

    async def Rollback(self, request: operator_pb2.RollbackRequest, context: Any) -> operator_pb2.RollbackResponse:
        update = await self._hub.begin_update(
            events.RollbackRequested(
                update_id=UpdateId(uuid.uuid4().hex),
                request_id=request.request_id,
                run_id=self._hub.run_or_mine(request.run_id),
                model=ModelName(request.model),
                number=request.number,
            )
        )
        assert update.restores is not None, "it is a rollback"
        return operator_pb2.RollbackResponse(
            update_id=update.update_id,
            version=version_to_proto(update.version),
            restores=version_to_proto(update.restores),
        )

    async def AcceptLedger(
        self, request: operator_pb2.AcceptLedgerRequest, context: Any
    ) -> operator_pb2.AcceptLedgerResponse:
        await self._hub.handle(
            events.LedgerAccepted(self._hub.run_or_mine(request.run_id), accepted_by=request.accepted_by)
        )
        return operator_pb2.AcceptLedgerResponse(
            coordinator_term=self._hub.core.term, next_number=self._hub.core.next_number
        )

    async def KeepVersion(
        self, request: operator_pb2.KeepVersionRequest, context: Any
    ) -> operator_pb2.KeepVersionResponse:
        engine_id = EngineId(request.engine_id)
        run_id = self._hub.run_or_mine(request.run_id)
        await self._hub.handle(events.KeepRequested(run_id, engine_id, ModelName(request.model), request.number))
        return operator_pb2.KeepVersionResponse(version=version_to_proto(self._hub.core.kept[engine_id].version))

    async def ReleaseVersion(
        self, request: operator_pb2.ReleaseVersionRequest, context: Any
    ) -> operator_pb2.ReleaseVersionResponse:
        run_id = self._hub.run_or_mine(request.run_id)
        await self._hub.handle(events.ReleaseRequested(run_id, EngineId(request.engine_id)))
        return operator_pb2.ReleaseVersionResponse()

    async def Plan(self, request: operator_pb2.PlanRequest, context: Any) -> operator_pb2.PlanResponse:
        found = await self._hub.preview(
            request.run_id,
            request.model,
            transport_from_proto(request.transport),
            FATES_BACK.get(request.link_fate),
        )
        return views.preview(found, self._hub.core.settings.run_id)


def _hello_event(session: int, frame: fleet_pb2.SessionRequest) -> events.Event:
    kind = frame.WhichOneof("frame")
    if kind == "engine_hello":
        return _engine_event(session, frame.engine_hello)
    if kind == "trainer_hello":
        return _trainer_event(session, frame.trainer_hello)
    raise FrameOutOfOrder(expected="a hello", got=kind or "nothing")


def _engine_event(session: int, hello: fleet_pb2.EngineHello) -> events.EngineConnected:
    check_speaks_as(caller(), Role.ENGINE, hello.status.engine.engine_id)
    return events.EngineConnected(
        session,
        engine_place_from_proto(hello),
        state_from_proto(hello.status),
        hello.status.gate_open,
        tuple(hello.capabilities),
        Term(hello.max_term),
        Term(hello.max_coordinator_term),
        hello.max_number,
        _refused(hello.status),
    )


def _checkpoint(message: fleet_pb2.Checkpoint) -> CheckpointKept:
    return CheckpointKept(
        ModelName(message.model),
        version_from_proto(message.version),
        message.name,
        message.layout_digest,
        message.content_digest,
        message.tensor_count,
        message.file_count,
        message.byte_count,
    )


def _refused(status: engine_pb2.EngineStatus) -> Refusal | None:
    return refusal_from_proto(status, time.time() - time.monotonic())


def _trainer_event(session: int, hello: fleet_pb2.TrainerHello) -> events.TrainerConnected:
    check_speaks_as(caller(), Role.TRAINER, hello.trainer_id)
    return events.TrainerConnected(
        session,
        RunId(hello.run_id),
        ModelName(hello.model),
        TrainerId(hello.trainer_id),
        Incarnation(hello.incarnation),
        rank_places_from_proto(hello),
        Term(hello.held_term),
        hello.ended_incarnation,
        hello.takeover,
        sends_from_proto(hello),
        load_from_proto(hello),
        tuple(hello.software),
    )


def _status_event(session: int, frame: fleet_pb2.SessionRequest) -> events.Event:
    kind = frame.WhichOneof("frame")
    if kind == "engine_status":
        status = frame.engine_status
        return events.EngineReported(session, state_from_proto(status), status.gate_open, _refused(status))
    if kind == "trainer_status":
        said = frame.trainer_status
        step = said.step if said.HasField("step") else None
        lost = tuple(LostRank(r.rank, r.cause) for r in said.lost_ranks)
        return events.TrainerReported(
            session, Term(said.term), step, said.phase, said.progress, said.holds_devices, lost
        )
    raise FrameOutOfOrder(expected="a status or a goodbye", got=kind or "nothing")
