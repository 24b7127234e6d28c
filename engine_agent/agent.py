"""The engine agent process: one engine, life after life, and the services beside it.

Order of a start: the port is bound, the engine starts, then the coordinator is told (L6). An engine that dies is
replaced by a fresh one in a new incarnation, unset, with a growing wait and a limit on deaths in a row; nothing of the
old one is left. systemd's watchdog is fed while this loop turns and looks at its engine.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import grpc
import structlog

from controlplane.config import ConfigError
from controlplane.core import engine_events as events
from controlplane.core.engine_state import EngineState, HoldKind
from controlplane.core.errors import EngineDied, LedgerError, WeightplaneError
from controlplane.core.fleet_catch_up import CHECKPOINT
from controlplane.core.pauses import KEEP, PausePolicy
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId
from controlplane.devices import cpu_device_uuid
from controlplane.exit_codes import ExitCode
from controlplane.rpc.security import PLAIN, ServerSecurity, TlsSettings, check_listen
from controlplane.rpc.server import PortUnavailable, RunningServer, start_server, wait_for_signal
from controlplane.supervision import Supervisor, Turns
from engine_agent.engine import Engine
from engine_agent.life import EngineLife, EngineLifeHolder
from engine_agent.lifecycle_service import LifecycleService
from engine_agent.members.head import Members
from engine_agent.members.nodes import FurtherNodes
from engine_agent.memory_engine import MemoryEngine, MemorySettings
from engine_agent.receivers import DEFAULT_TRANSPORTS, TRANSPORTS, transports_of
from engine_agent.remembered import Memory
from engine_agent.restarts import Restarts
from engine_agent.rollout_service import RolloutService
from engine_agent.session import Membership, Session
from engine_agent.update_service import WeightUpdateService
from engine_agent.vllm.settings import VllmSettings
from weightplane.local.v1 import member_pb2, member_pb2_grpc
from weightplane.v1 import (
    lifecycle_pb2,
    lifecycle_pb2_grpc,
    rollout_pb2,
    rollout_pb2_grpc,
    weight_update_pb2,
    weight_update_pb2_grpc,
)

log = structlog.get_logger(__name__)

RESTART_WAIT_SECONDS = (1.0, 30.0)
"""First and longest wait before a dead engine is replaced; doubled in between."""


@dataclass(frozen=True)
class EngineSettings:
    """How an engine agent runs."""

    engine_id: str
    """Name of the engine, unique in the run, stable over restarts."""
    coordinator: str = "127.0.0.1:7070"
    """Address of the coordinator."""
    run_id: str = "default"
    """The run that it belongs to."""
    model: str = "policy"
    """The model that it serves."""
    listen: str = "127.0.0.1:0"
    """Address to serve on; port 0 takes any free one."""
    advertise: str = ""
    """Address that others reach it by, if it is not the one it listens on."""
    state_dir: Path = Path("weightplane-state")
    """Directory for what must survive the agent: `<engine_id>.json`."""
    backend: str = "vllm"
    """vllm, or memory: an engine without a model, for tests."""
    vllm: VllmSettings | None = None
    """Settings of the vLLM engine."""
    memory: MemorySettings = field(default_factory=MemorySettings)
    """Settings of the in-memory engine."""
    cpu_devices: tuple[int, ...] = ()
    """On a host without GPUs: numbers of the "devices" of its workers; trainer ranks of equal numbers are colocated."""
    stream_idle_seconds: float = 60.0
    """An update's stream without a frame for so long is aborted."""
    max_restarts: int = 5
    """Deaths in a row after which it starts its engine again; then it ends. 10 minutes of life begin the count anew."""
    transports: tuple[str, ...] = DEFAULT_TRANSPORTS
    """How trainers may bring it bytes: shared_memory, inline, broadcast. inline is always among them."""
    checkpoint_root: Path | None = None
    """Directory of checkpoints that it may be brought up to date from; without one such updates are refused."""
    deltas: bool = False
    """Keep the bytes of what the engine holds, and take updates that change only some of them. Costs host memory of one
    copy of the weights, and of a second one during an update; with shared memory it brings nothing."""
    apply: Literal["staged", "streaming"] = "staged"
    """staged: the engine generates until a version is here, whole and checked. streaming: what comes by shared memory
    or inline is installed chunk by chunk, and needs no second copy of the weights here; generation stands still for
    the whole transfer, and a stream that fails leaves the engine shut until the next push."""
    pause: PausePolicy = KEEP
    """What becomes of the requests in the engine at an install, unless the trainer says it: `mode` keep, abort or wait;
    with wait `wait_seconds` and a `fallback`."""
    initial: Literal["unset", "serve"] = "unset"
    """unset: what the engine loads at its start is served to nobody. serve: it is served as number 0, and never
    updated: the engine of a frozen model (teacher, reference)."""
    group: str = ""
    """What the coordinator's min_engines counts it under."""
    unit: str = ""
    """Engines of one unit serve together or not at all, such as prefill and decode. Empty: it is alone."""
    unit_size: int = 0
    """How many engines its unit has."""

    tls: TlsSettings = PLAIN
    """How it proves who it is, and who may call it: see docs/security.md."""
    insecure: bool = False
    """Serve other hosts without TLS: for networks that keep strangers out by themselves."""

    def __post_init__(self) -> None:
        check_listen(self.listen, self.tls, self.insecure)
        if self.pause.problem_at_an_install:
            raise ValueError(f"pause: {self.pause.problem_at_an_install}")
        if self.unit_size < 0 or bool(self.unit) != bool(self.unit_size):
            raise ValueError("unit and unit_size go together: name the unit, and how many engines it has")
        if unknown := set(self.transports) - set(TRANSPORTS):
            raise ValueError(f"no transports: {sorted(unknown)}; there are {', '.join(TRANSPORTS)}")
        if "inline" not in self.transports:
            raise ValueError("transports: every engine takes inline, the way that is left where no other works")
        if self.apply not in ("staged", "streaming"):
            raise ValueError(f"apply: {self.apply!r}; there are staged and streaming")


async def run_engine(settings: EngineSettings, stop: asyncio.Event | None = None) -> int:
    """Run until SIGINT, SIGTERM or `stop`, or until the engine died too often. Returns the exit code."""
    stop = stop or asyncio.Event()
    holder = EngineLifeHolder()
    members = _members(settings)
    memory = Memory(settings.state_dir / f"{settings.engine_id}.json", settings.run_id, settings.model)
    try:
        holder.life = _new_life(settings, memory, members)
        security = ServerSecurity(settings.tls, settings.insecure, settings.run_id)
        server = await start_server(settings.listen, _services(holder, settings, stop, members), security)
    except PortUnavailable as error:
        log.error("port_unavailable", cause=str(error))
        return ExitCode.PORT_IN_USE
    except ConfigError as error:
        log.error("config_refused", cause=str(error))
        return ExitCode.CONFIG
    except LedgerError as error:
        log.error("memory_failed", cause=str(error))
        return ExitCode.LEDGER
    signalled = asyncio.create_task(wait_for_signal(stop))
    agent = _Agent(settings, memory, holder, server, signalled, members)
    try:
        return await agent.run()
    except LedgerError as error:  # a later life could not be counted
        log.error("memory_failed", cause=str(error))
        return ExitCode.LEDGER
    finally:
        signalled.cancel()
        await server.stop()
        log.info("engine_agent_stopped")


class _Agent:
    """Lives, one after the other."""

    def __init__(
        self,
        settings: EngineSettings,
        memory: Memory,
        holder: EngineLifeHolder,
        server: RunningServer,
        signalled: asyncio.Task[None],
        members: Members | None,
    ) -> None:
        self._settings = settings
        self._memory = memory
        self._holder = holder
        self._server = server
        self._signalled = signalled
        self._members = members
        self._endpoint = settings.advertise or server.address
        self._supervisor = Supervisor()
        self._turns = Turns()
        self._ready_at: float | None = None
        """When the present life's engine was ready."""

    async def run(self) -> int:
        feeding = asyncio.create_task(self._supervisor.feed(self._moved))
        try:
            return await self._lives()
        finally:
            feeding.cancel()
            self._supervisor.stopping()

    async def _lives(self) -> int:
        restarts = Restarts(self._settings.max_restarts, RESTART_WAIT_SECONDS)
        while not self._signalled.done():
            self._ready_at = None
            self._supervisor.status(f"starts an engine, life {self._holder.life.number}")
            code = await self._live(self._holder.life)
            if code is not None:
                return code
            wait = restarts.died(0.0 if self._ready_at is None else time.monotonic() - self._ready_at)
            if wait is None:
                log.error("engine_died_too_often", in_a_row=restarts.in_a_row)
                return ExitCode.ENGINE_FAILED
            self._supervisor.status(f"starts another engine in {wait:.0f} s")
            await self._devices_free(self._holder.life)
            await asyncio.wait({self._signalled}, timeout=wait)
            if not self._signalled.done():
                self._holder.life = _new_life(self._settings, self._memory, self._members)
        return ExitCode.OK

    def _moved(self) -> object:
        """For the watchdog. While an engine runs, this agent must look at it; a start has a deadline of its own."""
        return self._turns() if self._ready_at is None else self._holder.life.progress.looks

    async def _devices_free(self, last: EngineLife) -> None:
        """Nobody starts an engine on devices that somebody else has: a life that died asleep is replaced when its
        owner wakes it."""
        if last.devices_taken:
            log.warning("devices_taken", owner=last.core.state.held_by(HoldKind.ASLEEP))
            free = asyncio.create_task(last.devices_free.wait())
            await asyncio.wait({self._signalled, free}, return_when=asyncio.FIRST_COMPLETED)
            free.cancel()

    async def _live(self, life: EngineLife) -> int | None:
        """One life. None: it died, and another may follow."""
        cause = "the agent stops"
        try:
            if not await self._start(life):
                return ExitCode.OK
            log.info("engine_ready", endpoint=self._endpoint, incarnation=life.core.state.incarnation)
            self._ready_at = time.monotonic()
            self._supervisor.ready(f"engine {life.core.state.engine_id}, life {life.number}, at {self._endpoint}")
            member, tls = _membership(self._settings), self._settings.tls
            session = Session(life, self._settings.coordinator, self._endpoint, member, tls)
            running = asyncio.create_task(session.run())
            readiness = asyncio.create_task(self._follow_readiness(life))
            try:
                ends: set[asyncio.Future[Any]] = {self._signalled, life.died, running}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if life.died.done():
                    cause = life.died.result()
                    log.error("engine_died", cause=cause)
                    life.apply(events.Died(cause))
                    await session.tell()
                    return None
                if self._signalled.done():
                    life.apply(events.Stopping())
                    await session.leave("the agent stops")
                    return ExitCode.OK
                running.result()
                return ExitCode.FAILED
            finally:
                running.cancel()
                readiness.cancel()
                await self._server.set_serving(False)
        except EngineDied as error:
            cause = str(error)
            log.error("engine_start_failed", cause=cause)
            return None
        except WeightplaneError as error:
            log.error("session_refused", reason=error.reason, text=str(error))
            return ExitCode.CONFIG
        finally:
            await life.end(cause)

    async def _start(self, life: EngineLife) -> bool:
        """False: a signal came first."""
        starting = asyncio.create_task(life.start())
        await asyncio.wait({starting, self._signalled}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            return True
        starting.cancel()
        await asyncio.wait({starting})
        return False

    async def _follow_readiness(self, life: EngineLife) -> None:
        """Readiness is the gate."""
        async for _ in life.state.watch():
            await self._server.set_serving(life.open)


def _membership(settings: EngineSettings) -> Membership:
    reads = frozenset() if settings.checkpoint_root is None else frozenset({CHECKPOINT})
    transports = tuple(sorted(transports_of(settings.transports)))
    return Membership(settings.group, settings.unit, settings.unit_size, reads, transports)


def _members(settings: EngineSettings) -> Members | None:
    further = 0 if settings.vllm is None else settings.vllm.further_nodes
    return Members(settings.run_id, settings.engine_id, further) if further else None


def _new_life(settings: EngineSettings, memory: Memory, members: Members | None = None) -> EngineLife:
    state = EngineState(
        RunId(settings.run_id),
        ModelName(settings.model),
        EngineId(settings.engine_id),
        Incarnation(uuid.uuid4().hex[:16]),
    )
    engine, streaming = _new_engine(settings, members), settings.apply == "streaming"
    return EngineLife(state, engine, memory, deltas=settings.deltas, streaming=streaming, pause=settings.pause)


def _new_engine(settings: EngineSettings, members: Members | None) -> Engine:
    devices = tuple(str(cpu_device_uuid(i)) for i in settings.cpu_devices)
    serve = settings.initial == "serve"
    if settings.backend == "memory":
        memory = replace(settings.memory, device_uuids=devices) if devices else settings.memory
        return MemoryEngine(memory, settings.engine_id, serve_initial=serve)
    if settings.vllm is None:
        raise EngineDied(engine_id=settings.engine_id, cause="backend vllm needs the settings under [vllm]")
    from engine_agent.vllm.engine import VllmEngine  # heavy: an agent with the in-memory engine needs no vLLM

    vllm = replace(settings.vllm, device_uuids=devices) if devices else settings.vllm
    note = settings.state_dir / f"{settings.engine_id}.processes.json"
    further = FurtherNodes(members, vllm, settings.engine_id) if members is not None else None
    return VllmEngine(vllm, settings.engine_id, serve_initial=serve, note=note, further=further)


def _services(
    holder: EngineLifeHolder, settings: EngineSettings, stop: asyncio.Event, members: Members | None
) -> list[Callable[[grpc.aio.Server], str]]:
    def add(register: Callable[[Any, grpc.aio.Server], None], servicer: object, name: str) -> Any:
        def add_to(server: grpc.aio.Server) -> str:
            register(servicer, server)
            return name

        return add_to

    own = [
        add(
            member_pb2_grpc.add_EngineMembersServicer_to_server,
            members,
            member_pb2.DESCRIPTOR.services_by_name["EngineMembers"].full_name,
        )
    ]
    return (own if members is not None else []) + [
        add(
            weight_update_pb2_grpc.add_WeightUpdateServicer_to_server,
            WeightUpdateService(
                holder, settings.stream_idle_seconds, settings.checkpoint_root, transports_of(settings.transports)
            ),
            weight_update_pb2.DESCRIPTOR.services_by_name["WeightUpdate"].full_name,
        ),
        add(
            rollout_pb2_grpc.add_RolloutServicer_to_server,
            RolloutService(holder),
            rollout_pb2.DESCRIPTOR.services_by_name["Rollout"].full_name,
        ),
        add(
            lifecycle_pb2_grpc.add_LifecycleServicer_to_server,
            LifecycleService(holder, stop),
            lifecycle_pb2.DESCRIPTOR.services_by_name["Lifecycle"].full_name,
        ),
    ]
