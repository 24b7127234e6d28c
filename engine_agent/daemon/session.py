"""The agent's session with the coordinator: hello, full states at each change and each heartbeat, goodbye.

It comes again by itself after a break. While it is broken no gate shuts: tokens stay truly labelled (INV-10); it is the
coordinator that stops routing to an engine which it cannot hear.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from controlplane.core import engine_events as events
from controlplane.core.engine_state import EngineState, Stage
from controlplane.core.errors import (
    IdentityMismatch,
    IncompatibleNode,
    ModelFrozen,
    PermissionDenied,
    VersionConflict,
    WeightplaneError,
    WrongIncarnation,
    WrongRun,
)
from controlplane.core.versions import ModelName, Term
from controlplane.devices import host_id
from controlplane.rpc.channels import open_channel
from controlplane.rpc.codec import commit_from_proto, engine_ref, seconds_from_proto, version_from_proto
from controlplane.rpc.errors import from_rpc_error
from controlplane.rpc.latest import Latest
from controlplane.rpc.security import PLAIN, TlsSettings
from controlplane.rpc.security.diagnosis import explained
from engine_agent.engine import CUDA_IPC
from engine_agent.life.engine_life import EngineLife
from engine_agent.services.lifecycle_service import report_of
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc, version_pb2, weight_update_pb2

log = structlog.get_logger(__name__)

DEVICES = weight_update_pb2.TRANSPORT_CUDA_IPC
"""Settings may name it for every engine; those whose workers have no device that can be shared do not say it."""
RECONNECT_SECONDS = (0.2, 2.0)
"""First and longest wait before the next try; doubled in between, with jitter."""
WELCOME_LIMIT_SECONDS = 15.0
MOVING_SECONDS = 0.02
"""How long a report that an update is being received, or installed, may wait: of a small one it need not be sent."""

FATAL = (
    WrongRun,
    IncompatibleNode,
    WrongIncarnation,
    ModelFrozen,
    VersionConflict,
    PermissionDenied,
    IdentityMismatch,
)
"""Refusals that a reconnect cannot mend."""


@dataclass(frozen=True, slots=True)
class Membership:
    """What an engine counts as in its fleet; see EngineHello."""

    group: str = ""
    unit: str = ""
    unit_size: int = 0
    capabilities: frozenset[str] = frozenset()
    """Of the agent, beside the engine's own."""
    transports: tuple[weight_update_pb2.Transport.ValueType, ...] = ()
    """How bytes can reach it. Empty: shared memory and inline."""
    software: tuple[str, ...] = ()
    """What its vLLM runs on; see EngineHello."""


class Session:
    """Keeps one life's session. `run` ends with a fatal refusal, or when cancelled."""

    def __init__(
        self,
        life: EngineLife,
        coordinator: str,
        endpoint: str,
        member: Membership,
        tls: TlsSettings = PLAIN,
        *,
        waits: bool = False,
    ) -> None:
        """`waits`: the life is dead, and waits until its devices are given back."""
        self._life = life
        self._waits = waits
        self._member = member
        self._coordinator = coordinator
        self._tls = tls
        self._endpoint = endpoint
        self._heartbeat_seconds = 1.0
        self._goodbye: str | None = None
        self._left = asyncio.Event()
        self._told: Latest[EngineState | None] = Latest(None)
        """The state that was sent last."""
        self._told_open = False
        """Whether the gate is open, as it was told last: until then nobody is routed here (INV-10)."""

    async def run(self) -> None:
        """Raises the refusal when it is fatal."""
        wait = RECONNECT_SECONDS[0]
        async with open_channel(self._coordinator, self._tls) as channel:
            while self._goodbye is None:
                try:
                    await self._once(fleet_pb2_grpc.FleetStub(channel))
                    wait = RECONNECT_SECONDS[0]
                except grpc.aio.AioRpcError as error:
                    refusal = await explained(from_rpc_error(error), self._coordinator, self._tls)
                    if isinstance(refusal, FATAL):
                        raise refusal from error
                    log.warning("session_lost", reason=refusal.reason, text=str(refusal))
                except WeightplaneError as error:
                    log.warning("session_refused_here", reason=error.reason, text=str(error))
                if self._goodbye is not None:
                    break
                await asyncio.sleep(wait * random.uniform(0.5, 1.0))
                wait = min(wait * 2, RECONNECT_SECONDS[1])
        self._left.set()

    async def leave(self, reason: str, limit_seconds: float = 2.0) -> None:
        """Say goodbye, so that the coordinator need not wait for silence; then `run` ends."""
        self._goodbye = reason
        self._life.state.set(self._life.core.state)  # wakes the writer of frames
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_seconds):
                await self._left.wait()

    async def tell(self, limit_seconds: float = 1.0) -> None:
        """Return once the state as it is now was sent: before a life ends its last words are told (INV-8)."""
        last = self._life.state.value
        with contextlib.suppress(TimeoutError):
            await self._told.wait_for(lambda told: told is last, limit_seconds)

    async def _once(self, stub: Any) -> None:
        call = stub.Session(self._frames())
        frames = aiter(call)
        try:
            async with asyncio.timeout(WELCOME_LIMIT_SECONDS):
                welcome = await self._welcome(frames)
            self._welcomed(welcome)
            async for frame in frames:
                self._follow(Term(self._life.core.coordinator_term), frame.fleet_state)
        except TimeoutError:
            log.warning("session_lost", reason="DEADLINE_EXCEEDED", text="no welcome came")
        finally:
            call.cancel()

    async def _welcome(self, frames: AsyncIterator[fleet_pb2.SessionResponse]) -> fleet_pb2.Welcome:
        """A state that everybody was told just then may come before it, and says nothing that it does not."""
        async for frame in frames:
            if frame.WhichOneof("frame") == "welcome":
                return frame.welcome
        raise IncompatibleNode(what="first frame", expected="welcome", got="the end")

    def _welcomed(self, welcome: fleet_pb2.Welcome) -> None:
        self._heartbeat_seconds = seconds_from_proto(welcome.heartbeat_interval)
        self._follow(Term(welcome.coordinator_term), welcome.state)
        log.info("welcomed", coordinator_term=welcome.coordinator_term, revision=welcome.state.revision)

    def _follow(self, coordinator_term: Term, state: fleet_pb2.FleetState) -> None:
        """INV-7: the terms come before any update. Raises StaleTerm for an old coordinator's words."""
        mine = ModelName(self._life.core.state.model)
        for model in state.models:
            if model.model == mine:
                served = frozenset(version_from_proto(v) for v in model.served)
                for doubted in model.doubted:
                    if doubted.engine == _ref(self._life):
                        self._life.apply(events.Doubted(version_from_proto(doubted.version), doubted.cause))
                commits = tuple(commit_from_proto(c) for c in model.commits)
                self._life.apply(events.FleetChanged(coordinator_term, Term(model.term), served, commits))
                if self._waits:  # what an earlier session was told may be of before its devices were taken
                    self._life.lent.heard(model.device_holder, Term(model.term))

    async def _frames(self) -> AsyncIterator[fleet_pb2.SessionRequest]:
        """The hello, then the state at each change and at least every heartbeat: made by this loop, so that it
        stops when the loop does."""
        sent, self._told_open = self._life.state.value, self._life.core.gate_open
        yield fleet_pb2.SessionRequest(engine_hello=self._hello())
        while self._goodbye is None:
            sent = await self._next_state(sent)
            self._told_open = self._life.core.gate_open
            yield fleet_pb2.SessionRequest(engine_status=report_of(self._life))
            self._told.set(sent)
        yield fleet_pb2.SessionRequest(goodbye=fleet_pb2.Goodbye(reason=self._goodbye))

    async def _next_state(self, sent: EngineState) -> EngineState:
        """The state once it differs from `sent`, or the gate from what was told, which also moves with what the fleet
        serves; or when a heartbeat is due. One that only says that an update moves on waits a moment for what follows:
        nothing is decided by it."""

        def is_due(state: EngineState) -> bool:
            moved = state is not sent or self._life.core.gate_open != self._told_open
            return moved or self._goodbye is not None

        def is_news(state: EngineState) -> bool:
            return not _moves_on(state) or self._goodbye is not None

        try:
            await self._life.state.wait_for(is_due, self._heartbeat_seconds)
            return await self._life.state.wait_for(is_news, MOVING_SECONDS)
        except TimeoutError:
            return self._life.state.value

    def _hello(self) -> fleet_pb2.EngineHello:
        life = self._life
        facts = life.facts
        return fleet_pb2.EngineHello(
            status=report_of(life),
            endpoint=self._endpoint,
            host_id=host_id(),
            device_uuids=life.lent.device_uuids,
            capabilities=sorted(life.core.capabilities | self._member.capabilities),
            max_term=life.core.term,
            max_coordinator_term=life.core.coordinator_term,
            max_number=life.core.number,
            group=self._member.group,
            unit=self._member.unit,
            unit_size=self._member.unit_size,
            incarnation_number=life.number,
            transports=[t for t in self._member.transports if t != DEVICES or CUDA_IPC in life.core.capabilities],
            likeness="" if facts is None else facts.likeness,
            max_requests=0 if facts is None else facts.max_requests,
            software=self._member.software,
        )


def _moves_on(state: EngineState) -> bool:
    """Between what go and the decision wait for."""
    return state.progress is not None and state.progress.stage in (Stage.RECEIVING, Stage.INSTALLING)


def _ref(life: EngineLife) -> version_pb2.EngineRef:
    return engine_ref(life.core.state.engine_id, life.core.state.incarnation)
