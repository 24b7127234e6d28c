"""weightplane.v1.Lifecycle of a trainer agent: what its ranks are, how to end them, what they wrote and do.

What is an engine's alone is refused with UNSUPPORTED_BY_ENGINE. Nothing here can change a version (INV-2).
"""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import grpc
import structlog

from controlplane import stacks
from controlplane.core.errors import InvalidRequest, UnsupportedByEngine, WrongIncarnation, WrongRun
from controlplane.rpc.codec import seconds_to_proto, stacks_to_proto
from controlplane.rpc.security import ServerSecurity
from controlplane.rpc.server import OPEN, RunningServer, start_server
from trainer_agent.agent.output import RankOutput
from trainer_agent.agent.rankset import RankSet
from trainer_agent.agent.settings import TrainerSettings
from weightplane.v1 import fleet_pb2, lifecycle_pb2, lifecycle_pb2_grpc

log = structlog.get_logger(__name__)

DEFAULT_LINES = 100
PUSH_PHASE = "push"


class Trainer(Protocol):
    """What is asked about the agent."""

    @property
    def ranks(self) -> RankSet | None:
        """The present life of the set of ranks."""
        ...

    @property
    def run_id(self) -> str:
        """Empty: not known yet."""
        ...

    @property
    def waits_for(self) -> str:
        """Why the lease is not held."""
        ...

    @property
    def update(self) -> fleet_pb2.UpdateState | None:
        """The update that is being carried."""
        ...

    @property
    def checkpoint(self) -> str:
        """What is being written to disk."""
        ...


class TrainerLifecycle(lifecycle_pb2_grpc.LifecycleServicer):
    """Of one trainer agent."""

    def __init__(
        self, settings: TrainerSettings, trainer: Trainer, stop: asyncio.Event | None, output: RankOutput | None
    ) -> None:
        """`stop` ends the ranks in order; None: they are not ours to end. `output`: None: it is not ours either."""
        self._settings = settings
        self._trainer = trainer
        self._stop = stop
        self._output = output

    async def GetStatus(self, request: lifecycle_pb2.GetStatusRequest, context: Any) -> lifecycle_pb2.GetStatusResponse:
        self._check_run(request.run_id)
        trainer = self._trainer
        status = lifecycle_pb2.TrainerAgentStatus(
            trainer_id=self._settings.trainer_id,
            run_id=trainer.run_id,
            waits_for=trainer.waits_for,
            update=trainer.update,
            checkpoint=trainer.checkpoint,
        )
        if trainer.ranks is not None:
            _describe(trainer.ranks, status)
        return lifecycle_pb2.GetStatusResponse(trainer=status)

    async def Shutdown(self, request: lifecycle_pb2.ShutdownRequest, context: Any) -> lifecycle_pb2.ShutdownResponse:
        self._check_run(request.run_id)
        incarnation = "" if self._trainer.ranks is None else self._trainer.ranks.incarnation
        if request.incarnation != incarnation:
            raise WrongIncarnation(
                engine_id=self._settings.trainer_id, expected=incarnation or "none yet", got=request.incarnation
            )
        if self._stop is None:
            raise self._unsupported("its ranks are their launcher's to end")
        log.info("told_to_end", peer=context.peer(), reason=request.reason)
        self._stop.set()
        return lifecycle_pb2.ShutdownResponse(limit=seconds_to_proto(self._settings.stop_seconds))

    async def TailLogs(self, request: lifecycle_pb2.TailLogsRequest, context: Any) -> lifecycle_pb2.TailLogsResponse:
        self._check_run(request.run_id)
        if self._output is None:
            raise self._unsupported("its ranks write to their launcher's output")
        lines = self._output.tail(request.rank, request.lines or DEFAULT_LINES)
        if lines is None:
            count = self._settings.nproc_per_node
            raise InvalidRequest(field="rank", problem=f"this node has {count} ranks, from 0; got {request.rank}")
        return lifecycle_pb2.TailLogsResponse(lines=[lifecycle_pb2.LogLine(text=x.text, error=x.error) for x in lines])

    async def DumpStacks(
        self, request: lifecycle_pb2.DumpStacksRequest, context: Any
    ) -> lifecycle_pb2.DumpStacksResponse:
        self._check_run(request.run_id)
        ranks = self._trainer.ranks
        members = {} if ranks is None else ranks.members
        strange = sorted(set(request.ranks) - members.keys())
        if strange:
            raise InvalidRequest(field="ranks", problem=f"ranks {strange} are not there; there are {sorted(members)}")
        pids = {f"rank {r}": members[r].pid for r in request.ranks or members}
        return stacks_to_proto(await stacks.dump(pids))

    async def PauseGeneration(
        self, request: lifecycle_pb2.PauseGenerationRequest, context: Any
    ) -> lifecycle_pb2.PauseGenerationResponse:
        raise self._unsupported("it generates nothing")

    async def ResumeGeneration(
        self, request: lifecycle_pb2.ResumeGenerationRequest, context: Any
    ) -> lifecycle_pb2.ResumeGenerationResponse:
        raise self._unsupported("it generates nothing")

    async def Sleep(self, request: lifecycle_pb2.SleepRequest, context: Any) -> lifecycle_pb2.SleepResponse:
        raise self._unsupported("its devices are its training loop's to give")

    async def WakeUp(self, request: lifecycle_pb2.WakeUpRequest, context: Any) -> lifecycle_pb2.WakeUpResponse:
        raise self._unsupported("its devices are its training loop's to take")

    async def Drain(self, request: lifecycle_pb2.DrainRequest, context: Any) -> lifecycle_pb2.DrainResponse:
        raise self._unsupported("it takes no requests; see Shutdown")

    async def AbortRequests(
        self, request: lifecycle_pb2.AbortRequestsRequest, context: Any
    ) -> lifecycle_pb2.AbortRequestsResponse:
        raise self._unsupported("it takes no requests")

    async def FlushCache(
        self, request: lifecycle_pb2.FlushCacheRequest, context: Any
    ) -> lifecycle_pb2.FlushCacheResponse:
        raise self._unsupported("it has no caches")

    async def WatchStatus(self, request: lifecycle_pb2.WatchStatusRequest, context: Any) -> Any:
        raise self._unsupported("its status is asked for, not watched")
        yield

    def _check_run(self, run_id: str) -> None:
        known = self._trainer.run_id
        if known and run_id != known:
            raise WrongRun(expected=known, got=run_id)

    def _unsupported(self, what: str) -> UnsupportedByEngine:
        return UnsupportedByEngine(engine_id=f"trainer agent {self._settings.trainer_id}", what=what)


async def serve(service: TrainerLifecycle, listen: str, security: ServerSecurity = OPEN) -> RunningServer:
    """Raises PortUnavailable, ConfigError."""

    def register(server: grpc.aio.Server) -> str:
        lifecycle_pb2_grpc.add_LifecycleServicer_to_server(service, server)
        return lifecycle_pb2.DESCRIPTOR.services_by_name["Lifecycle"].full_name

    server = await start_server(listen, [register], security)
    await server.set_serving(True)
    log.info("trainer_serves", address=server.address)
    return server


def _describe(ranks: RankSet, status: lifecycle_pb2.TrainerAgentStatus) -> None:
    status.model, status.incarnation = ranks.model, ranks.incarnation
    status.restart_count, status.term = ranks.restart_count, ranks.term
    for rank in range(ranks.world_size):
        status.ranks.append(_rank_status(ranks, rank))


def _rank_status(ranks: RankSet, rank: int) -> lifecycle_pb2.RankStatus:
    step, phase = ranks.progress_of(rank)
    found = lifecycle_pb2.RankStatus(rank=rank, step=step, phase=phase, state=lifecycle_pb2.RANK_STATE_AWAITED)
    if rank in ranks.gone:
        connection, found.cause = ranks.gone[rank]
        found.state = lifecycle_pb2.RANK_STATE_ENDED
    elif rank in ranks.members:
        connection = ranks.members[rank]
        pushing = phase == PUSH_PHASE
        found.state = lifecycle_pb2.RANK_STATE_PUSHING if pushing else lifecycle_pb2.RANK_STATE_TRAINING
    else:
        return found
    found.pid, found.device_uuid = connection.pid, connection.join.device_uuid
    return found
