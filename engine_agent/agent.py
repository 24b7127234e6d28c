"""The engine agent process: one engine, life after life, and the services beside it.

Order of a start: the port is bound, the engine starts, then the coordinator is told (L6). An engine that dies is
replaced by a fresh one in a new incarnation, unset, with a growing wait and a limit on deaths in a row; nothing of the
old one is left. Where a trainer has the engine's devices, by the note of an earlier agent too, none is started before
they are given back (INV-7). systemd's watchdog is fed while this loop turns and looks at its engine.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import grpc
import structlog

from controlplane.config import ConfigError
from controlplane.core import engine_events as events
from controlplane.core.engine_state import EngineState, Hold, HoldKind, Life, Residency
from controlplane.core.errors import EngineDied, LedgerError, UnsupportedByEngine, WeightplaneError
from controlplane.core.fleet_catch_up import CHECKPOINT
from controlplane.core.pauses import KEEP, PausePolicy
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId
from controlplane.devices import cpu_device_uuid
from controlplane.exit_codes import ExitCode
from controlplane.rpc.metrics import serve_metrics, watch_loop
from controlplane.rpc.ports import PortUnavailable
from controlplane.rpc.security import PLAIN, ServerSecurity, TlsSettings, check_listen
from controlplane.rpc.server import RunningServer, start_server, wait_for_signal
from controlplane.supervision import Supervisor, Turns
from engine_agent.engine import Engine
from engine_agent.external.settings import ExternalSettings
from engine_agent.life import EngineLife, EngineLifeHolder
from engine_agent.lifecycle_service import LifecycleService
from engine_agent.members.head import Members
from engine_agent.members.nodes import FurtherNodes
from engine_agent.memory_engine import MemoryEngine, MemorySettings
from engine_agent.metrics import AgentMetrics
from engine_agent.openai_door.settings import OpenAiSettings
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

if TYPE_CHECKING:
    from engine_agent.openai_door.answers import App
    from engine_agent.openai_door.running import RunningDoor

log = structlog.get_logger(__name__)

STOPS = "the agent stops"
BEHIND_THE_GATE = ("weightplane.v1.WeightUpdate", "weightplane.v1.Lifecycle")
"""Services that an engine has as long as it lives."""
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
    """vllm; external: a vLLM server that somebody else started; or memory: an engine without a model, for tests."""
    vllm: VllmSettings | None = None
    """Settings of the vLLM engine."""
    external: ExternalSettings | None = None
    """How the external server is reached."""
    memory: MemorySettings = field(default_factory=MemorySettings)
    """Settings of the in-memory engine."""
    cpu_devices: tuple[int, ...] = ()
    """On a host without GPUs: numbers of the "devices" of its workers; trainer ranks of equal numbers are colocated."""
    stream_idle_seconds: float = 60.0
    """An update's stream without a frame for so long is aborted."""
    stop_drain_seconds: float = 20.0
    """At SIGTERM: how long requests in the engine may go on, while no others enter. A second signal ends it at once."""
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
    openai: OpenAiSettings | None = None
    """Serve vLLM's OpenAI-compatible API too, behind the gate. Absent: no."""
    metrics_listen: str = ""
    """Address that answers GET /metrics; empty: none does."""
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
        if self.openai is not None and self.backend != "vllm":
            raise ValueError("openai: only vLLM has such an API; an in-memory engine has none")
        if self.backend == "external" and self.initial == "serve":
            raise ValueError("initial = serve: what an external server holds is nobody's until an update (INV-1)")
        if self.apply not in ("staged", "streaming"):
            raise ValueError(f"apply: {self.apply!r}; there are staged and streaming")


async def run_engine(settings: EngineSettings, stop: asyncio.Event | None = None) -> int:
    """Run until SIGINT, SIGTERM or `stop`, or until the engine died too often. Returns the exit code."""
    stop = stop or asyncio.Event()
    holder = EngineLifeHolder()
    members = _members(settings)
    memory = Memory(settings.state_dir / f"{settings.engine_id}.json", settings.run_id, settings.model)
    door: RunningDoor | None = None
    try:
        holder.life = _first_life(settings, memory, members)
        door = _door(holder, settings)
        security = ServerSecurity(settings.tls, settings.insecure, settings.run_id)
        server = await start_server(settings.listen, _services(holder, settings, stop, members), security)
        end_metrics = serve_metrics(settings.metrics_listen, AgentMetrics(holder), tls=settings.tls)
    except PortUnavailable as error:
        log.error("port_unavailable", cause=str(error))
        if door is not None:
            await door.stop()
        return ExitCode.PORT_IN_USE
    except ConfigError as error:
        log.error("config_refused", cause=str(error))
        return ExitCode.CONFIG
    except LedgerError as error:
        log.error("memory_failed", cause=str(error))
        return ExitCode.LEDGER
    hurry = asyncio.Event()
    signalled = asyncio.create_task(wait_for_signal(stop, hurry))
    agent = _Agent(settings, memory, holder, server, signalled, hurry, members, door)
    try:
        return await agent.run()
    except LedgerError as error:  # a later life could not be counted
        log.error("memory_failed", cause=str(error))
        return ExitCode.LEDGER
    finally:
        signalled.cancel()
        if door is not None:
            await door.stop()
        end_metrics()
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
        hurry: asyncio.Event,
        members: Members | None,
        door: RunningDoor | None,
    ) -> None:
        self._settings = settings
        self._memory = memory
        self._holder = holder
        self._server = server
        self._signalled = signalled
        self._hurry = hurry
        self._members = members
        self._door = door
        self._endpoint = settings.advertise or server.address
        self._supervisor = Supervisor()
        self._turns = Turns()
        self._ready_at: float | None = None
        """When the present life's engine was ready."""

    async def run(self) -> int:
        feeding = asyncio.create_task(self._supervisor.feed(self._moved))
        measuring = asyncio.create_task(watch_loop())
        try:
            return await self._lives()
        finally:
            feeding.cancel()
            measuring.cancel()
            self._supervisor.stopping()

    async def _lives(self) -> int:
        restarts = Restarts(self._settings.max_restarts, RESTART_WAIT_SECONDS)
        while not self._signalled.done():
            life, self._ready_at = self._holder.life, None
            if life.lent.taken:
                code = await self._wait_for_devices(life)
                if code is not None:
                    return code
            if life.core.state.life is Life.DEAD:
                life = self._holder.life = _new_life(self._settings, self._memory, self._members)
            self._supervisor.status(f"starts an engine, life {life.number}")
            code = await self._live(life)
            if code is not None:
                return code
            wait = restarts.died(0.0 if self._ready_at is None else time.monotonic() - self._ready_at)
            if wait is None:
                log.error("engine_died_too_often", in_a_row=restarts.in_a_row)
                return ExitCode.ENGINE_FAILED
            self._supervisor.status(f"starts another engine in {wait:.0f} s")
            await asyncio.wait({self._signalled}, timeout=wait)
        return ExitCode.OK

    def _moved(self) -> object:
        """For the watchdog. While an engine runs, this agent must look at it; a start has a deadline of its own."""
        return self._turns() if self._ready_at is None else self._holder.life.progress.looks

    async def _wait_for_devices(self, life: EngineLife) -> int | None:
        """Nobody starts an engine on devices that somebody else has. Until they are free the coordinator hears that
        this engine is dead and sleeps, and where it is reached. None: they are free."""
        owner = life.core.state.held_by(HoldKind.ASLEEP)
        log.warning("devices_taken", owner=owner)
        self._supervisor.ready(f"waits for its devices, which {owner} has")
        session = self._session(life, waits=True)
        running, free = asyncio.create_task(session.run()), asyncio.create_task(life.lent.free.wait())
        try:
            ends: set[asyncio.Future[Any]] = {self._signalled, running, free}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
                return ExitCode.FAILED
            if self._signalled.done():
                await session.leave("the agent stops")
                return ExitCode.OK
            await session.tell()
            log.info("devices_free")
            return None
        except WeightplaneError as error:
            log.error("session_refused", reason=error.reason, text=str(error))
            return ExitCode.CONFIG
        finally:
            running.cancel()
            free.cancel()

    async def _live(self, life: EngineLife) -> int | None:
        """One life. None: it died, and another may follow."""
        cause = STOPS
        try:
            if not await self._start(life):
                return ExitCode.OK
            log.info("engine_ready", endpoint=self._endpoint, incarnation=life.core.state.incarnation)
            self._ready_at = time.monotonic()
            self._supervisor.ready(self._in_a_line(life, life.core.state))
            async with nullcontext() if self._door is None else self._door.open_for(life):
                return await self._serve(life)
        except EngineDied as error:
            cause = str(error)
            log.error("engine_start_failed", cause=cause)
            return None
        except UnsupportedByEngine as error:
            log.error("engine_unsupported", reason=error.reason, text=str(error))
            return ExitCode.CONFIG
        except WeightplaneError as error:
            log.error("session_refused", reason=error.reason, text=str(error))
            return ExitCode.CONFIG
        finally:
            await life.end(cause)

    def _session(self, life: EngineLife, *, waits: bool = False) -> Session:
        settings = self._settings
        member = _membership(settings)
        return Session(life, settings.coordinator, self._endpoint, member, settings.tls, waits=waits)

    async def _serve(self, life: EngineLife) -> int | None:
        """In the fleet, until the life or the agent ends."""
        session = self._session(life)
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
                await self._drain(life)
                life.apply(events.Stopping())
                await session.leave(STOPS)
                return ExitCode.OK
            running.result()
            return ExitCode.FAILED
        finally:
            running.cancel()
            readiness.cancel()
            await self._server.set_serving(False)

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

    async def _drain(self, life: EngineLife) -> None:
        """Nobody enters any more, and who is in may go on to the end, for a while."""
        if not len(life.requests) or not life.open:  # behind a shut gate none of them would end
            return
        self._supervisor.status(f"drains {len(life.requests)} requests")
        life.apply(events.HoldChanged(Hold(HoldKind.DRAINING, STOPS), present=True))
        ends: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(life.requests.none_left()),
            asyncio.ensure_future(self._hurry.wait()),
        ]
        limit = self._settings.stop_drain_seconds
        await asyncio.wait({*ends, life.died}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            end.cancel()
        if len(life.requests):
            log.warning("requests_cut", count=len(life.requests), waited_seconds=limit)

    async def _follow_readiness(self, life: EngineLife) -> None:
        """Readiness is the gate, and updates and orders are taken behind a shut one too. `systemctl status` shows what
        the engine says of itself."""
        async for state in life.state.watch():
            await self._server.set_serving(life.open, besides=BEHIND_THE_GATE)
            self._supervisor.status(self._in_a_line(life, state))

    def _in_a_line(self, life: EngineLife, state: EngineState) -> str:
        word = state.word(life.core.served)
        return f"{word}, {state.model} {state.applied or 'unset'}; life {life.number}, at {self._endpoint}"


def _door(holder: EngineLifeHolder, settings: EngineSettings) -> RunningDoor | None:
    """Raises PortUnavailable."""
    asked = settings.openai
    if asked is None:
        return None
    from engine_agent.openai_door.running import RunningDoor  # an agent without a door needs no HTTP libraries

    async def build(life: EngineLife) -> App:
        from engine_agent.vllm.api_app import api_app
        from engine_agent.vllm.engine import VllmEngine

        assert isinstance(life.engine, VllmEngine)  # the settings refuse the door of any other
        return await api_app(life, life.engine, asked)

    return RunningDoor(holder, asked, build)


def _membership(settings: EngineSettings) -> Membership:
    reads = frozenset() if settings.checkpoint_root is None else frozenset({CHECKPOINT})
    transports = tuple(sorted(transports_of(settings.transports)))
    return Membership(settings.group, settings.unit, settings.unit_size, reads, transports)


def _members(settings: EngineSettings) -> Members | None:
    further = 0 if settings.vllm is None else settings.vllm.further_nodes
    return Members(settings.run_id, settings.engine_id, further) if further else None


def _first_life(settings: EngineSettings, memory: Memory, members: Members | None) -> EngineLife:
    """Dead from its beginning, without an engine, where an earlier agent noted that its devices are somebody else's."""
    lent = memory.lent()
    if lent is None:
        return _new_life(settings, memory, members)
    holds = frozenset(Hold(HoldKind.ASLEEP, owner) for owner in lent.owners)
    frozen = settings.initial == "serve"
    asleep = replace(_new_state(settings), life=Life.DEAD, residency=Residency.ASLEEP, holds=holds, frozen=frozen)
    return _new_life(settings, memory, members, asleep)


def _new_state(settings: EngineSettings) -> EngineState:
    return EngineState(
        RunId(settings.run_id),
        ModelName(settings.model),
        EngineId(settings.engine_id),
        Incarnation(uuid.uuid4().hex[:16]),
    )


def _new_life(
    settings: EngineSettings, memory: Memory, members: Members | None, state: EngineState | None = None
) -> EngineLife:
    """`state`: what it begins with, if it is not a start."""
    state = state or _new_state(settings)
    engine, streaming = _new_engine(settings, members), settings.apply == "streaming"
    return EngineLife(state, engine, memory, deltas=settings.deltas, streaming=streaming, pause=settings.pause)


def _new_engine(settings: EngineSettings, members: Members | None) -> Engine:
    devices = tuple(str(cpu_device_uuid(i)) for i in settings.cpu_devices)
    serve = settings.initial == "serve"
    if settings.backend == "memory":
        memory = replace(settings.memory, device_uuids=devices) if devices else settings.memory
        return MemoryEngine(memory, settings.engine_id, serve_initial=serve)
    if settings.backend == "external":
        return _external(settings, devices)
    if settings.vllm is None:
        raise EngineDied(engine_id=settings.engine_id, cause="backend vllm needs the settings under [vllm]")
    from engine_agent.vllm.engine import VllmEngine  # heavy: an agent with the in-memory engine needs no vLLM

    vllm = replace(settings.vllm, device_uuids=devices) if devices else settings.vllm
    vllm = replace(vllm, load_tokenizer=True) if settings.openai is not None else vllm
    note = settings.state_dir / f"{settings.engine_id}.processes.json"
    further = FurtherNodes(members, vllm, settings.engine_id) if members is not None else None
    return VllmEngine(vllm, settings.engine_id, serve_initial=serve, note=note, further=further)


def _external(settings: EngineSettings, devices: tuple[str, ...]) -> Engine:
    if settings.external is None:
        raise EngineDied(
            engine_id=settings.engine_id, cause="backend external needs the settings under [external]: url, model"
        )
    from engine_agent.external.engine import ExternalEngine  # aiohttp comes with the engines' extras

    external = replace(settings.external, device_uuids=devices) if devices else settings.external
    return ExternalEngine(external, settings.engine_id)


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
