"""The engine agent process: one engine, life after life, and the services beside it.

Order of a start: the port is bound, the engine starts, then the coordinator is told (L6). An engine that dies is
replaced by a fresh one in a new incarnation, unset, with a growing wait and a limit on deaths in a row; nothing of the
old one is left. Where a trainer has the engine's devices, by the note of an earlier agent too, none is started before
they are given back (INV-7). systemd's watchdog is fed while this loop turns and looks at its engine.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import structlog

from controlplane.allocator import keep_freed_memory
from controlplane.config import ConfigError
from controlplane.core import engine_events as events
from controlplane.core.engine_state import EngineState, Hold, HoldKind, Life
from controlplane.core.errors import EngineDied, LedgerError, UnsupportedByEngine, WeightplaneError
from controlplane.exit_codes import ExitCode
from controlplane.rpc.metrics import serve_metrics, watch_loop
from controlplane.rpc.ports import PortUnavailable
from controlplane.rpc.security import ServerSecurity
from controlplane.rpc.server import RunningServer, start_server, wait_for_signal
from controlplane.supervision import Supervisor, Turns
from controlplane.tracing import sending_spans
from engine_agent.daemon.building import door_of, first_life, members_of, membership_of, new_life, services_of
from engine_agent.daemon.metrics import AgentMetrics
from engine_agent.daemon.restarts import Restarts
from engine_agent.daemon.session import Session
from engine_agent.daemon.settings import EngineSettings
from engine_agent.life.engine_life import EngineLife, EngineLifeHolder
from engine_agent.life.remembered import Memory
from engine_agent.members.head import Members

if TYPE_CHECKING:
    from engine_agent.openai_door.running import RunningDoor

log = structlog.get_logger(__name__)

STOPS = "the agent stops"
BEHIND_THE_GATE = ("weightplane.v1.WeightUpdate", "weightplane.v1.Lifecycle")
"""Services that an engine has as long as it lives."""
RESTART_WAIT_SECONDS = (1.0, 30.0)
"""First and longest wait before a dead engine is replaced; doubled in between."""


async def run_engine(settings: EngineSettings, stop: asyncio.Event | None = None) -> int:
    """Run until SIGINT, SIGTERM or `stop`, or until the engine died too often. Returns the exit code."""
    keep_freed_memory()
    async with sending_spans(settings.tracing, "engine", settings.engine_id, settings.run_id):
        return await _run(settings, stop or asyncio.Event())


async def _run(settings: EngineSettings, stop: asyncio.Event) -> int:
    async with AsyncExitStack() as ends:
        try:
            agent = await _bound(settings, stop, ends)
            return await agent.run()
        except PortUnavailable as error:
            log.error("port_unavailable", cause=str(error))
            return ExitCode.PORT_IN_USE
        except ConfigError as error:
            log.error("config_refused", cause=str(error))
            return ExitCode.CONFIG
        except LedgerError as error:  # also where a later life could not be counted
            log.error("memory_failed", cause=str(error))
            return ExitCode.LEDGER


async def _bound(settings: EngineSettings, stop: asyncio.Event, ends: AsyncExitStack) -> _Agent:
    """Its ports are bound, and no engine has started. `ends` will close what was opened, also where something else
    could not be. Raises PortUnavailable, ConfigError, LedgerError."""
    ends.callback(log.info, "engine_agent_stopped")
    holder, members = EngineLifeHolder(), members_of(settings)
    memory = Memory(settings.state_dir / f"{settings.engine_id}.json", settings.run_id, settings.model)
    holder.life = first_life(settings, memory, members)
    door = door_of(holder, settings)
    if door is not None:
        ends.push_async_callback(door.stop)
    ends.callback(serve_metrics(settings.metrics_listen, AgentMetrics(holder), tls=settings.tls))
    security = ServerSecurity(settings.tls, settings.insecure, settings.run_id, settings.rate)
    server = await start_server(settings.listen, services_of(holder, settings, stop, members), security)
    ends.push_async_callback(server.stop)
    hurry = asyncio.Event()
    signalled = asyncio.create_task(wait_for_signal(stop, hurry))
    ends.callback(signalled.cancel)
    return _Agent(settings, memory, holder, server, signalled, hurry, members, door)


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
                life = self._holder.life = new_life(self._settings, self._memory, self._members)
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
        member = membership_of(settings)
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
        if not len(life.requests) or not life.gate.runs:  # where the scheduler stands none of them would end
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
        return f"{word}, {state.model} {state.applied or 'unset'}; incarnation {life.number}, at {self._endpoint}"
