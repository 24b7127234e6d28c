"""One incarnation of one engine: its core, its engine, its live requests, its gate, its install.

Decisions are in `controlplane.core.engine_core`; here they are carried out. Installs, sleep and the gate share one
lock, so the engine's scheduler is started and stopped by one of them at a time. Sleeps and wakes share another: each
is decided when the one before is done, so what the core believes of the devices is what they are.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from controlplane.core import engine_core as core
from controlplane.core import engine_events as events
from controlplane.core import engine_sleep
from controlplane.core.canary import CanaryReference
from controlplane.core.engine_state import EngineState, Hold, HoldKind
from controlplane.core.engine_streaming import STREAMING
from controlplane.core.errors import (
    CanaryFailed,
    EngineDied,
    InstallFailed,
    InstallTimedOut,
    WeightplaneError,
)
from controlplane.core.lag import LAG_BINS
from controlplane.core.layout import TAKES_FORMAT
from controlplane.core.pauses import KEEP, PausePolicy
from controlplane.core.versions import Term, UpdateId, WeightVersion
from controlplane.rpc.latest import Latest
from controlplane.rpc.metrics import INSTALLS, PAUSE_PARTS, PAUSE_SECONDS, TOKEN_LAG
from controlplane.rpc.tasks import to_the_end
from engine_agent.engine import Engine, EngineFacts
from engine_agent.kept_maps import KeptMaps
from engine_agent.life.gate import Gate
from engine_agent.life.installing import Applied, Install, prove_at_last
from engine_agent.life.kept_base import BaseKeeper
from engine_agent.life.lent import LentDevices
from engine_agent.life.outcomes import Outcomes
from engine_agent.life.progress import Progress
from engine_agent.life.remembered import Memory, Remembered
from engine_agent.life.requests import Requests
from engine_agent.life.streaming import StreamingInstall
from engine_agent.receivers import Receiver, Spare
from engine_agent.receivers.links import EngineLinks

log = structlog.get_logger(__name__)


class EngineLife:
    """One incarnation. `state` is watched by the session, the services and the gate; `number` is the life's."""

    def __init__(
        self,
        initial: EngineState,
        engine: Engine,
        memory: Memory,
        *,
        deltas: bool = False,
        keep_staging: bool | None = False,
        streaming: bool = False,
        pause: PausePolicy = KEEP,
    ) -> None:
        """`deltas`: the bytes of what it holds are kept, and deltas to them taken. `keep_staging`: memory that one
        version came into is kept for the next; None: where there is room. `streaming`: updates that are installed as
        they come are taken. `pause`: of installs, unless their writers say how."""
        self.pause = pause
        self.clock_shift = time.time() - time.monotonic()
        """Seconds that turn this life's monotonic time into the clock's: of one moment, so that dates do not move."""
        seen, self.number = memory.begin_life()
        self._lives = seen.lives
        self.core = core.EngineCore(
            initial,
            term=Term(seen.term),
            coordinator_term=Term(seen.coordinator_term),
            number=seen.number,
        )
        self.engine = engine
        self.facts: EngineFacts | None = None
        self.state: Latest[EngineState] = Latest(initial)
        self.owed_reference: CanaryReference | None = None
        """What the canary that was put off last is to be compared with."""
        self.requests = Requests(engine, self._count, self._disagree, self._made)
        self.tokens_by_lag = [0] * LAG_BINS
        """Tokens made so far, by how many fleet commits their version was behind then."""
        self.waiting = 0
        """Requests outside the gate."""
        self.base = BaseKeeper(wanted=deltas)
        self.spare = Spare(wanted=keep_staging)
        self._takes_streaming = streaming
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.lent = LentDevices(self.core, memory, self.apply)
        self._memory = memory
        self._lock = asyncio.Lock()
        self.progress = Progress(engine, self._lock.locked, self._stalled)
        self._power = asyncio.Lock()
        self.gate = Gate(self, self._lock)
        self._next_stream = 0
        self._stream_errors: dict[int, asyncio.Future[WeightplaneError]] = {}
        self._receivers: dict[int, Receiver] = {}
        self._streaming: dict[int, StreamingInstall] = {}
        self.links = EngineLinks(initial.engine_id)
        self.segments = KeptMaps()
        """Senders' segments, between updates."""
        self._outcomes = Outcomes()
        self._checksums: dict[str, bytes] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    # ---- life ----

    async def start(self) -> None:
        """Start the engine. Raises EngineDied."""
        self.facts = await self.engine.start()
        takes = frozenset({core.DELTA}) if self.base.wanted and self.facts.initial_digest is None else frozenset()
        takes |= {TAKES_FORMAT + self.facts.expected.format}
        capabilities = (self.facts.capabilities | takes) - self._not_taken(self.facts.capabilities)
        self.apply(events.Started(self.facts.expected, capabilities, self.facts.initial_digest))
        self._spawn(self.gate.keep())
        self._spawn(self._probe())

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
                self.die(str(error))

    def _stalled(self, stalled: bool) -> None:
        """INV-10: what shows no progress is not routed to; who is in may go on to the end."""
        if stalled:
            log.warning("engine_stalled")
        else:
            log.warning("engine_answers")
        self.apply(events.HoldChanged(Hold(HoldKind.STALLED, self.core.state.engine_id), present=stalled))

    def die(self, cause: str) -> None:
        """This life cannot go on; whoever runs it ends it."""
        if not self.died.done():
            self.died.set_result(cause)

    async def end(self, cause: str) -> None:
        """The engine is gone or must go; nothing of this incarnation is left afterwards."""
        self.die(cause)
        self.apply(events.Died(cause))
        self.requests.fail_all(EngineDied(engine_id=self.core.state.engine_id, cause=cause))
        for task in self._tasks:
            task.cancel()
        for stream in list(self._receivers):
            self.drop(stream)
        self.spare.close()
        self.links.close()
        self.segments.close()
        await self.engine.shutdown()

    @property
    def device_uuids(self) -> tuple[str, ...]:
        """Of a life that never had an engine: what an earlier one noted."""
        return self.lent.noted_uuids if self.facts is None else self.facts.device_uuids

    @property
    def steps(self) -> bool:
        """The scheduler runs: requests that are in the engine go on."""
        return self.gate.runs

    @property
    def open(self) -> bool:
        """Requests may enter: the gate is open and the scheduler runs."""
        return self.core.gate_open and self.gate.runs

    # ---- events ----

    def apply(self, event: events.Event) -> list[events.Effect]:
        """Decide an event and carry out what is not the caller's own to do: all of it, also where the disk is full, so
        that what is decided is what is claimed. Raises the core's refusals; LedgerError: no writer is let in while what
        this agent saw is not on its disk (INV-7).
        """
        effects = self.core.handle(event, time.monotonic())
        if isinstance(event, events.FleetChanged):
            self.links.heard(self.core.term)
        self.base.follow(self.core.state)
        self.lent.note(self.device_uuids)
        for effect in effects:
            match effect:
                case events.Remember(term, coordinator_term, number):
                    self._remember(Remembered(term, coordinator_term, number, self._lives))
                case events.CutStreaming(stream, error):
                    self._streaming[stream].cut(error)
                case events.EndStream(stream, error):
                    self._end_stream(stream, error)
                case events.DropStaged(stream):
                    self.drop(stream)
                case events.InstallDecided(update_id, error):
                    self._outcomes.decide(update_id, error)
                case events.Report():
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
            self._spawn(asyncio.to_thread(self._memory.write_number))
        else:
            self._memory.remember(remembered)

    def _count(self) -> None:
        """Rides along with the next report; a report for each request would be too many."""
        live, places = len(self.requests), len(self.requests) if self.facts is None else self.facts.max_requests
        waiting = self.waiting + max(0, live - places)
        self.apply(events.RequestsCounted(live, waiting, tuple(self.tokens_by_lag)))

    def _made(self, version: WeightVersion, count: int) -> None:
        lag = self.core.commits.lag(version)
        self.tokens_by_lag[min(lag, LAG_BINS - 1)] += count
        TOKEN_LAG.count(self.core.state.model, lag, count)

    @contextmanager
    def waiting_outside(self) -> Iterator[None]:
        """One request more waits outside the gate while the block runs."""
        self.waiting += 1
        self._count()
        try:
            yield
        finally:
            self.waiting -= 1
            self._count()

    def _disagree(self, cause: str) -> None:
        log.error("spans_disagree", cause=cause)
        self.apply(events.SpansDisagreed(cause))

    # ---- streams ----

    def new_stream(self) -> tuple[int, asyncio.Future[WeightplaneError]]:
        """A stream's number, and the error with which another event may end it."""
        self._next_stream += 1
        future: asyncio.Future[WeightplaneError] = asyncio.get_running_loop().create_future()
        self._stream_errors[self._next_stream] = future
        return self._next_stream, future

    def end_stream(self, stream: int, cause: str, reason: str) -> None:
        """The stream is over, however it ended (INV-3)."""
        self._stream_errors.pop(stream, None)
        self.apply(events.StreamEnded(stream, cause, reason))

    def _end_stream(self, stream: int, error: WeightplaneError) -> None:
        future = self._stream_errors.get(stream)
        if future is not None and not future.done():
            future.set_result(error)

    def keep(self, stream: int, receiver: Receiver) -> None:
        self._receivers[stream] = receiver

    def drop(self, stream: int) -> None:
        receiver = self._receivers.pop(stream, None)
        if receiver is not None:
            receiver.close()

    # ---- installs ----

    def start_install(self, effect: events.StartInstall) -> None:
        """From here on the agent owns the update: the stream may die (INV-4, INV-6)."""
        self._outcomes.begin(effect.update.update_id)
        install = Install(self, self._receivers[effect.stream], effect.update)
        self._spawn(self._install(effect.stream, effect.update, install))

    def start_streaming(self, effect: events.StartStreaming) -> StreamingInstall:
        """From here on only its end opens the gate; what ends its stream before the commit frame cuts it (INV-4)."""
        self._outcomes.begin(effect.update.update_id)
        install = StreamingInstall(self, self._receivers[effect.stream], effect.update)
        self._streaming[effect.stream] = install
        self._spawn(self._install(effect.stream, effect.update, install))
        return install

    async def outcome(self, update_id: UpdateId) -> Applied:
        """Wait for the end of an update's install. Raises its error."""
        return await self._outcomes.of(update_id)

    async def _install(self, stream: int, update: events.Update, install: Install) -> None:
        async with self._lock:
            try:
                await install.run()
            except (InstallTimedOut, EngineDied) as error:
                await self._lost_in_install(error)
            except InstallFailed as error:
                self._refused(error, touched=error.touched)
            except CanaryFailed as error:
                self._refused(error, touched=True)
            except WeightplaneError as error:
                self._refused(error, touched=update.quiesced)
            finally:
                self._streaming.pop(stream, None)
                self.drop(stream)

    def note_checksums(self, update: events.Update) -> int | None:
        """How many tensors differ from the last install's, by their checksums."""
        assert update.assembly is not None  # it was committed
        tensors = update.assembly.layout.tensors
        fresh = {t.name: update.assembly.checksum(i) for i, t in enumerate(tensors)}
        before, self._checksums = self._checksums, fresh
        return sum(before.get(name) != checksum for name, checksum in fresh.items()) if before else None

    def applied(self, update: events.Update, receiver: Receiver, found: Applied) -> None:
        """INV-1: the version is claimed in the step that finished, with what the install found out beside it."""
        self._outcomes.note(update.update_id, found)
        if found.canary is None:
            self.owed_reference = update.reference
            self.apply(events.CanaryDeferred(found.timings, found.changed_tensors))
        else:
            self.apply(events.CanaryPassed(found.timings, found.canary, found.changed_tensors))
        if self.base.take(update, receiver):
            del self._receivers[update.stream]
        else:
            receiver.installed()
        INSTALLS.labels("applied").inc()
        for part in PAUSE_PARTS:
            PAUSE_SECONDS.labels(part).observe(getattr(found.timings, part))
        log.info(
            "weights_applied", version=update.version.number, update_id=update.update_id, timings=str(found.timings)
        )

    def _refused(self, error: WeightplaneError, *, touched: bool) -> None:
        """INV-4: nothing is resumed here; the gate opens only if the weights are whole and served."""
        INSTALLS.labels(error.reason).inc()
        log.error("install_failed", reason=error.reason, text=str(error), touched=touched)
        self.apply(events.InstallEnded(error, touched))
        if touched:
            self.requests.abort_all()

    async def _lost_in_install(self, error: WeightplaneError) -> None:
        """An unknown outcome: the processes go, and a new incarnation takes their place."""
        INSTALLS.labels(error.reason).inc()
        log.error("install_lost", reason=error.reason, text=str(error))
        self.apply(events.InstallEnded(error, touched=True))
        self.requests.abort_all()
        self.die(str(error))

    # ---- sleep ----

    async def sleep(self, event: events.SleepRequested) -> None:
        """Free the devices; returns when they are free. From here on what it takes away is not claimed (INV-1).

        Once begun it goes to its end, whoever waits. Raises the core's refusals, EngineDied.
        """
        self.core.heed(event)
        async with self._power:
            if self.lent.sleeps_for(event.owner):
                return
            self.lent.expect(event.owner, self.device_uuids)
            try:
                effects = self.apply(event)
            except WeightplaneError:
                self.lent.note(self.device_uuids)
                raise
            if any(isinstance(effect, events.StartSleep) for effect in effects):
                await to_the_end(self._or_die(self._sleep(event.level)))

    async def _sleep(self, level: int) -> None:
        async with self._lock:
            await self.gate.stop_scheduler()
            await self.engine.quiesce()  # also where a failed install left the scheduler in an unknown state
            await self.engine.sleep(level)

    async def wake(self, event: events.WakeRequested) -> None:
        """Take the devices again; returns when that is done. Raises the core's refusals, EngineDied."""
        self.core.heed(event)
        if event.kv:
            self.lent.given_back([event.owner])
        async with self._power:
            if any(isinstance(effect, events.StartWake) for effect in self.apply(event)):
                await to_the_end(self._or_die(self._wake(event.kv)))

    async def _wake(self, kv: bool) -> None:
        async with self._lock:
            await self.engine.wake(kv_cache=kv)
            self.apply(events.Woke(kv))
            if engine_sleep.owes_canary(self.core.state):
                await prove_at_last(self)

    def disproven(self, error: WeightplaneError) -> None:
        """What was installed asleep is wrong (INV-4): the next full update heals it."""
        log.error("unproven_version_is_wrong", reason=error.reason, text=str(error))
        self.apply(events.Disproven(str(error)))
        self.requests.abort_all()

    async def _or_die(self, work: Coroutine[Any, Any, None]) -> None:
        """An engine that neither sleeps nor wakes is in an unknown state: its life ends."""
        try:
            await work
        except Exception as error:
            cause = f"sleep or wake did not end: {error!r}"
            self.die(cause)
            raise EngineDied(engine_id=self.core.state.engine_id, cause=cause) from error

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task that ends by an error that nobody planned for ends this life: better none than a wrong one."""
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("engine_task_failed", exc_info=task.exception())
            self.die(f"a task of the agent failed: {task.exception()!r}")


class EngineLifeHolder:
    """Where the services find the present life."""

    life: EngineLife
