"""One incarnation of one engine: events in, decided by its core; effects out, carried out by its parts.

Decisions are in `controlplane.core.engine_core`. Here each is written down before what follows from it (INV-7), handed
to the part that it is for, and told. What starts or stops the engine's scheduler (the gate, installs, sleep) shares one
lock, so that it is done by one of them at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import structlog

from controlplane.core import engine_core as core
from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as events
from controlplane.core.engine_state import EngineState, Hold, HoldKind
from controlplane.core.engine_streaming import STREAMING
from controlplane.core.errors import EngineDied, WeightplaneError
from controlplane.core.layout import TAKES_FORMAT
from controlplane.core.pauses import KEEP, PausePolicy
from controlplane.core.versions import Term
from controlplane.rpc.latest import Latest
from engine_agent.engine import Engine, EngineFacts
from engine_agent.kept_maps import KeptMaps
from engine_agent.life.counts import RequestCounts
from engine_agent.life.exports import EngineExports
from engine_agent.life.gate import Gate
from engine_agent.life.installs import Installs
from engine_agent.life.kept_base import BaseKeeper
from engine_agent.life.lent import LentDevices
from engine_agent.life.life_parts import LifeParts
from engine_agent.life.power import Power
from engine_agent.life.progress import Progress
from engine_agent.life.remembered import Memory, Remembered
from engine_agent.life.requests import Requests
from engine_agent.life.streams import Streams
from engine_agent.life.tasks import LifeTasks
from engine_agent.receivers import Spare
from engine_agent.receivers.links import EngineLinks

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LifeSettings:
    """How a life takes updates."""

    deltas: bool = False
    """The bytes of what it holds are kept, and deltas to them taken."""
    keep_staging: bool | None = False
    """Memory that one version came into is kept for the next; None: where there is room."""
    streaming: bool = False
    """Updates that are installed as they come are taken."""
    pause: PausePolicy = KEEP
    """Of installs, unless their writers say how."""


class EngineLife:
    """One incarnation. `state` is watched by the session, the services and the gate; `number` is the life's."""

    def __init__(
        self, initial: EngineState, engine: Engine, memory: Memory, settings: LifeSettings = LifeSettings()
    ) -> None:
        self.clock_shift = time.time() - time.monotonic()
        """Seconds that turn this life's monotonic time into the clock's: of one moment, so that dates do not move."""
        seen, self.number = memory.begin_life()
        self._memory, self._lives = memory, seen.lives
        self._takes_streaming = settings.streaming
        self.core = core.EngineCore(
            initial, term=Term(seen.term), coordinator_term=Term(seen.coordinator_term), number=seen.number
        )
        self.state: Latest[EngineState] = Latest(initial)
        self.engine = engine
        self.facts: EngineFacts | None = None
        self.counts = RequestCounts(self.core, self.apply)
        self.requests = Requests(engine, self.counts.entered, self._disagree, self.counts.made)
        self._tasks = LifeTasks()
        self.died = self._tasks.died
        self._lock = asyncio.Lock()
        parts = LifeParts(self.core, self.apply, self.state, engine, self.requests, self._tasks, self._lock)
        self.gate = Gate(parts)
        self.streams = Streams(self.apply)
        self.base = BaseKeeper(wanted=settings.deltas)
        self.installs = Installs(parts, self.gate, self.streams, self.base, settings.pause)
        self.lent = LentDevices(self.core, memory, self.apply)
        self.power = Power(parts, self.gate, self.lent, self.installs.prove_at_last)
        self.progress = Progress(engine, self._lock.locked, self._stalled)
        self.spare = Spare(wanted=settings.keep_staging)
        self.links = EngineLinks(initial.engine_id)
        self.exports = EngineExports(engine, initial.engine_id)
        self.segments = KeptMaps()
        """Senders' segments, between updates."""

    # ---- from its start to its end ----

    async def start(self) -> None:
        """Start the engine. Raises EngineDied."""
        self.facts = await self.engine.start()
        self.counts.places, self.lent.device_uuids = self.facts.max_requests, self.facts.device_uuids
        takes = frozenset({core.DELTA}) if self.base.wanted and self.facts.initial_digest is None else frozenset()
        takes |= {TAKES_FORMAT + self.facts.expected.format}
        capabilities = (self.facts.capabilities | takes) - self._not_taken(self.facts.capabilities)
        self.apply(events.Started(self.facts.expected, capabilities, self.facts.initial_digest))
        self._tasks.spawn(self.gate.keep())
        self._tasks.spawn(self._probe())

    def _not_taken(self, able: frozenset[str]) -> frozenset[str]:
        """Raises EngineDied: what the settings ask for is not there; better no engine than another one."""
        if self._takes_streaming and STREAMING not in able:
            cause = "apply = streaming was asked for, and this engine installs whole versions only"
            raise EngineDied(engine_id=self.core.state.engine_id, cause=cause)
        return frozenset() if self._takes_streaming else frozenset({STREAMING})

    async def _probe(self) -> None:
        """INV-10: an engine that is gone is not left routable until somebody asks it for tokens."""
        try:
            await self.progress.watch()
        except WeightplaneError as error:
            async with self._lock:  # an install under way says first what became of it
                self._tasks.die(str(error))

    def _stalled(self, stalled: bool) -> None:
        """INV-10: what shows no progress is not routed to; who is in may go on to the end."""
        if stalled:
            log.warning("engine_stalled")
        else:
            log.warning("engine_answers")
        self.apply(events.HoldChanged(Hold(HoldKind.STALLED, self.core.state.engine_id), present=stalled))

    async def end(self, cause: str) -> None:
        """The engine is gone or must go; nothing of this incarnation is left afterwards."""
        self._tasks.die(cause)
        self.apply(events.Died(cause))
        self.requests.fail_all(EngineDied(engine_id=self.core.state.engine_id, cause=cause))
        self._tasks.cancel()
        self.streams.drop_all()
        self.spare.close()
        self.links.close()
        self.segments.close()
        await self.engine.shutdown()

    @property
    def open(self) -> bool:
        """Requests may enter: the gate is open and the scheduler runs."""
        return self.core.gate_open and self.gate.runs

    # ---- events ----

    def apply(self, event: events.Event) -> list[fx.Effect]:
        """Decide an event and carry out what is not the caller's own to do: all of it, also where the disk is full, so
        that what is decided is what is claimed. Raises the core's refusals; LedgerError: no writer is let in while what
        this agent saw is not on its disk (INV-7).
        """
        effects = self.core.handle(event, time.monotonic())
        if isinstance(event, events.FleetChanged):
            self.links.heard(self.core.term)
            if self.exports.heard(self.core.term) and self.core.update is None:
                self._tasks.spawn(self.exports.close())
        self.base.follow(self.core.state)
        self.lent.note()
        for effect in effects:
            match effect:
                case fx.Remember(term, coordinator_term, number):
                    self._remember(Remembered(term, coordinator_term, number, self._lives))
                case fx.CutStreaming(stream, error):
                    self.streams.cut(stream, error)
                case fx.EndStream(stream, error):
                    self.streams.end(stream, error)
                case fx.DropStaged(stream):
                    self.streams.drop(stream)
                case fx.InstallDecided(update_id, error):
                    self.installs.decided(update_id, error)
                case fx.Report():
                    self.state.set(self.core.state)
                case _:
                    pass  # Accept, Verify, SendReady, StartInstall: the stream that caused them answers
        if isinstance(event, events.Opened):
            self._memory.settle()
        self._memory.settle_soon()
        return effects

    def _remember(self, remembered: Remembered) -> None:
        """A number that grew is written beside the install of its version, terms before anything follows (INV-7)."""
        if self._memory.put_off(remembered):
            self._tasks.spawn(asyncio.to_thread(self._memory.write_number))
        else:
            self._memory.remember(remembered)

    def _disagree(self, cause: str) -> None:
        log.error("spans_disagree", cause=cause)
        self.apply(events.SpansDisagreed(cause))


class EngineLifeHolder:
    """Where the services find the present life, and those who watch an engine its next one."""

    _life: EngineLife | None = None

    @property
    def life(self) -> EngineLife:
        assert self._life is not None  # the agent has one before it serves
        return self._life

    @life.setter
    def life(self, life: EngineLife) -> None:
        before, self._life = self._life, life
        if before is not None:
            before.state.end()

    async def follow(self) -> AsyncIterator[EngineLife]:
        """The present life, now and at each change of its state, and after it each next one so."""
        while True:
            life = self.life
            async for _ in life.state.watch():
                yield life
