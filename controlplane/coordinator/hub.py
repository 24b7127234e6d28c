"""Where events meet the core and effects leave it.

One event at a time: its effects are carried out, in order, before the next event is decided. So nothing is told
before it is in the ledger, and what people read is never ahead of the disk. A ledger that cannot write ends the
coordinator (`failed` is set): a restart knows only what was told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any

import structlog

from controlplane import failpoints, tracing
from controlplane.coordinator import views
from controlplane.coordinator.happenings import Happenings
from controlplane.coordinator.metrics import count_decided
from controlplane.coordinator.spans import trace_decided
from controlplane.coordinator.token_lags import TokenLags
from controlplane.core.errors import LedgerError, UnknownUpdate, WeightplaneError, WrongRun
from controlplane.core.fleet import FleetCore
from controlplane.core.fleet_events import (
    BroadcastState,
    Carry,
    CloseSession,
    Effect,
    EngineReported,
    Event,
    Paused,
    Save,
    StartCarry,
    Tick,
    UpdateChanged,
    UpdatePlanned,
    ViewChanged,
    Welcome,
)
from controlplane.core.fleet_preview import Preview, preview
from controlplane.core.fleet_records import UpdateDecided
from controlplane.core.kept_stacks import StackShelf
from controlplane.core.plan import LinkFate, Transport
from controlplane.core.update_transaction import UpdateTransaction
from controlplane.core.versions import ModelName, RunId, Term, UpdateId, WeightVersion
from controlplane.ledger import Ledger
from controlplane.rpc.codec import seconds_to_proto, version_from_proto
from controlplane.rpc.latest import Latest
from controlplane.rpc.tasks import to_the_end
from weightplane.v1 import fleet_pb2, operator_pb2

log = structlog.get_logger(__name__)

PAUSE_SHARE = 0.5
"""Of the lease's time: five ticks that did not come."""
TOGETHER_SECONDS = 0.02
"""Changes that come closer together than this are told at once, to who routes and to who waits for an update. The first
engine that takes requests under a version does not wait for others: the trainer's loop may wait for just that."""
VIEW_SECONDS = 0.1
"""The same for people: a view is made of the whole fleet."""
UNWATCHED_VIEW_SECONDS = 1.0
"""The same while nobody looks: for what happened, and for whoever asks for metrics."""
REST = 9
"""For each second that either takes to make, so many pass before the next one: of a large fleet most of the time is the
engines', whose reports decide."""
_SEEN = (UpdateChanged, ViewChanged)
MAX_ENGINES_LOGGED = 32
"""Of a record: each has a dozen words there, and a thousand of them a cost of their own."""
MAX_PENDING_FRAMES = 256
"""Frames waiting for one agent; an agent that reads none for so long is cut off and comes again."""


class Outbox:
    """What goes to one session: the welcome, then states, then perhaps an error that ends it."""

    def __init__(self) -> None:
        self._frames: asyncio.Queue[fleet_pb2.SessionResponse | WeightplaneError] = asyncio.Queue(MAX_PENDING_FRAMES)
        self.welcomed = False
        """Its hello was answered: from then on it is told the fleet's states."""

    def put(self, item: fleet_pb2.SessionResponse | WeightplaneError) -> None:
        if self._frames.full():
            self._frames.get_nowait()  # states are level-triggered: the oldest is the one nobody needs
        self._frames.put_nowait(item)

    async def get(self) -> fleet_pb2.SessionResponse:
        """The next frame. Raises the error that ends the session."""
        item = await self._frames.get()
        if isinstance(item, WeightplaneError):
            raise item
        return item


class Hub:
    """The coordinator's one writer."""

    def __init__(self, core: FleetCore, ledger: Ledger, writer: ThreadPoolExecutor, heartbeat_seconds: float) -> None:
        self.core = core
        self.heartbeat_seconds = heartbeat_seconds
        self.clock_shift = time.time() - time.monotonic()
        """Seconds that turn the core's time into the clock's: of one moment, so that dates do not move."""
        self._messages, self._happenings, self._lags = views.Messages(), Happenings(), TokenLags()
        self.failed: asyncio.Future[LedgerError] = asyncio.get_running_loop().create_future()
        first = self._view()
        self._happenings.see(first)
        self._lags.see(first)
        self.view: Latest[operator_pb2.FleetView] = Latest(first)
        self.recovering = Latest(core.recovering)
        """As the core says: told at once, and without a view."""
        self.stacks = StackShelf()
        self.start_carry: Callable[[Carry], None] = _no_carrier
        """Who brings versions from checkpoints; set by the daemon."""
        self._ledger = ledger
        self._writer = writer
        self._lock = asyncio.Lock()
        self._seen, self._told = asyncio.Event(), asyncio.Event()
        """Something that people, or clients, see changed since they were shown it last."""
        self._outboxes: dict[int, Outbox] = {}
        self._updates: dict[UpdateId, Latest[fleet_pb2.UpdateState]] = {}
        self._moved: set[UpdateId] = set()
        """Updates of which an engine reported something that is not shown yet."""
        self._routes: dict[tuple[ModelName, bool], Latest[fleet_pb2.WatchRoutesResponse]] = {}
        """By model, and whether engines that stay at a version are among them."""
        self._routed: dict[tuple[ModelName, bool], frozenset[WeightVersion]] = {}
        """Versions under which clients were told of an engine."""
        self._next_session = 0
        self.ticks = 0
        """Ticks that went through the core and the ledger: what its watchdog is fed from."""
        self._handled_at = time.monotonic()
        for update in core.updates.values():
            self._publish_update(update)

    # ---- sessions ----

    def new_session(self) -> tuple[int, Outbox]:
        self._next_session += 1
        outbox = self._outboxes[self._next_session] = Outbox()
        return self._next_session, outbox

    def drop_session(self, session: int) -> None:
        self._outboxes.pop(session, None)

    # ---- events ----

    async def handle(self, event: Event) -> list[Effect]:
        """Decide an event and carry its effects out. Raises what the core refuses with."""
        async with self._lock:
            if self.failed.done():  # the core is ahead of the disk now: nothing more is decided or told
                raise self.failed.result()
            now = self._now()
            effects = self.core.handle(event, now)
            # A caller that leaves must not leave half of the effects undone, nor let the next event in before them.
            if any(isinstance(effect, Save) for effect in effects):
                await to_the_end(self._carry_out(effects))
            else:
                self._tell(effects)
            if any(isinstance(effect, _SEEN) for effect in effects):
                self._seen.set()
                self._told.set()
                if isinstance(event, EngineReported) and event.gate_open:
                    self._tell_first_route(event.session)
            if self.recovering.value != self.core.recovering:
                self.recovering.set(self.core.recovering)
            return effects

    def _now(self) -> float:
        """Monotonic seconds. Ticks come often, so a long gap since the last event is a pause of this process."""
        now = time.monotonic()
        gap, self._handled_at = now - self._handled_at, now
        if gap > self.core.settings.lease_ttl_seconds * PAUSE_SHARE:
            log.warning("coordinator_was_paused", seconds=round(gap, 3))
            self.core.handle(Paused(gap), now)
        return now

    async def begin_update(self, event: Event) -> UpdateTransaction:
        effects = await self.handle(event)
        return next(e.update for e in effects if isinstance(e, UpdatePlanned))

    async def tick_forever(self, interval_seconds: float) -> None:
        while True:
            await asyncio.sleep(interval_seconds)
            await self.handle(Tick())
            self.ticks += 1

    async def publish_forever(self) -> None:
        """What is told once for all events that came close together, after the first of them were answered. Between two
        events, so that nothing is shown that is not in the ledger (INV-9)."""
        await asyncio.gather(
            self._publish_together(self._told, self._publish_changes, TOGETHER_SECONDS),
            self._publish_together(self._seen, self._publish_view, VIEW_SECONDS, self._unwatched),
        )

    async def _publish_together(
        self,
        changed: asyncio.Event,
        publish: Callable[[], None],
        seconds: float,
        then: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        """`then`: what may be waited for beyond that."""
        rest = seconds
        while True:
            await changed.wait()
            await asyncio.sleep(rest)
            if then is not None:
                await then()
            async with self._lock:
                changed.clear()
                began = time.monotonic()
                if not self.failed.done():
                    publish()
                rest = max(seconds, REST * (time.monotonic() - began))

    async def _unwatched(self) -> None:
        """Wait on while nobody looks."""
        with suppress(TimeoutError):
            async with asyncio.timeout(UNWATCHED_VIEW_SECONDS - VIEW_SECONDS):
                await self.view.watched()

    async def fleet_view(self) -> operator_pb2.FleetView:
        """As it is now."""
        async with self._lock:
            if self.failed.done():
                return self.view.value
            view = self._view()
            self._happenings.show(view)
            self._lags.show(view)
            return view

    async def watch_fleet(self) -> AsyncIterator[operator_pb2.FleetView]:
        """From the fleet as it is now."""
        async with self._lock:
            if self._seen.is_set() and not self.failed.done():
                self._seen.clear()
                self._publish_view()
        async for view in self.view.watch():
            yield view

    async def preview(self, run_id: str, model: str, transport: Transport | None, fate: LinkFate | None) -> Preview:
        """What an update would do if it began now. Between two events, like all that is told."""
        self.check_run(run_id)
        async with self._lock:
            if self.failed.done():
                raise self.failed.result()
            return preview(self.core, model, transport, fate)

    async def _carry_out(self, effects: list[Effect]) -> None:
        """What is to be saved comes first (INV-9)."""
        for effect in effects:
            match effect:
                case Save(UpdateDecided() as record):
                    failpoints.hit("coordinator.before_decision")
                    await self._save(record)
                    failpoints.hit("coordinator.after_decision")
                    count_decided(self.core.updates[record.update_id])
                    tracing.soon(trace_decided, self.core.settings.run_id, self.core.updates[record.update_id])
                case Save(record):
                    await self._save(record)
                case _:
                    self._tell([effect])

    def _tell(self, effects: list[Effect]) -> None:
        """What follows from what is saved."""
        for effect in effects:
            match effect:
                case Save():
                    raise AssertionError("saving takes a while")
                case Welcome(session, term):
                    self._greet(session, term)
                case CloseSession(session, error):
                    if session in self._outboxes:
                        self._outboxes[session].put(error)
                case BroadcastState():
                    self._broadcast()
                case StartCarry(carry):
                    self.start_carry(carry)
                case UpdateChanged(update_id):
                    self._update_changed(self.core.updates[update_id])
                case ViewChanged():
                    pass  # `publish_forever` shows it
                case UpdatePlanned():
                    pass  # the answer to its caller

    async def _save(self, record: object) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, self._ledger.save, record)  # type: ignore[arg-type]
        except LedgerError as error:
            if not self.failed.done():
                self.failed.set_result(error)
            raise
        update_id = getattr(record, "update_id", None)
        of_update = tracing.log_fields(self.core.settings.run_id, update_id) if update_id else {}
        log.info("record_written", kind=type(record).__name__, record=_in_short(record), **of_update)

    # ---- telling ----

    def _welcome(self, session: int, trainer_term: Term) -> fleet_pb2.Welcome:
        return fleet_pb2.Welcome(
            coordinator_term=self.core.term,
            heartbeat_interval=seconds_to_proto(self.heartbeat_seconds),
            lease_ttl=seconds_to_proto(self.core.settings.lease_ttl_seconds),
            trainer_term=trainer_term,
            state=views.fleet_state(self.core, session),
        )

    def _greet(self, session: int, term: Term) -> None:
        """The first frame of a session; states come after it, never before."""
        outbox = self._outboxes.get(session)
        if outbox is not None:
            outbox.put(fleet_pb2.SessionResponse(welcome=self._welcome(session, term)))
            outbox.welcomed = True

    def _broadcast(self) -> None:
        """One state for all, but for members of units, which may serve less."""
        common = fleet_pb2.SessionResponse(fleet_state=views.fleet_state(self.core))
        for session, outbox in self._outboxes.items():
            if not outbox.welcomed:
                continue
            own = self.core.serves_its_own(session)
            state = fleet_pb2.SessionResponse(fleet_state=views.fleet_state(self.core, session)) if own else common
            outbox.put(state)

    def _update_changed(self, update: UpdateTransaction) -> None:
        """A phase is told at once, for it permits commit frames or ends the update; what one engine of many reported
        comes with the next view: a state names all engines, and one for each report of each is the fleet's square."""
        topic = self._updates.get(update.update_id)
        if topic is None or topic.value.phase != views.PHASES[update.phase]:
            self._publish_update(update)
        else:
            self._moved.add(update.update_id)

    def _publish_changes(self) -> None:
        for update_id in self._moved & self.core.updates.keys():
            self._publish_update(self.core.updates[update_id])
        self._moved.clear()
        for model, kept in self._routes:
            self._publish_routes(model, kept=kept)

    def _tell_first_route(self, session: int) -> None:
        """Once for each version: of a large fleet the others come together."""
        record = self.core.of_session(session)
        if record is None or not self.core.routable(record):
            return
        stays = self.core.kept_at(record) is not None
        for (model, kept), versions in self._routed.items():
            if model == record.state.model and record.state.applied not in versions and (kept or not stays):
                self._publish_routes(model, kept=kept)

    def _publish_routes(self, model: ModelName, *, kept: bool) -> None:
        topic = self._routes[model, kept]
        new = views.routes(self.core, model, topic.value.revision + 1, kept=kept)
        if list(new.routes) != list(topic.value.routes) or list(new.served) != list(topic.value.served):
            topic.set(new)
        self._routed[model, kept] = frozenset(version_from_proto(r.applied) for r in new.routes)

    def _publish_update(self, update: UpdateTransaction) -> None:
        state = views.update_state(update, self.clock_shift)
        topic = self._updates.get(update.update_id)
        if topic is None:
            self._updates[update.update_id] = Latest(state)
        elif topic.value != state:
            topic.set(state)
        for gone in self._updates.keys() - self.core.updates.keys():
            del self._updates[gone]

    def _publish_view(self) -> None:
        view = self._view()
        self._happenings.see(view)
        self._lags.see(view)
        self.view.set(view)

    def _view(self) -> operator_pb2.FleetView:
        return views.fleet_view(self.core, time.monotonic(), self.clock_shift, self._messages)

    # ---- watching ----

    def run_or_mine(self, run_id: str) -> RunId:
        """An empty run id means this one."""
        return RunId(run_id) if run_id else self.core.settings.run_id

    def check_run(self, run_id: str) -> None:
        """An empty run id means this one."""
        if run_id and run_id != self.core.settings.run_id:
            raise WrongRun(expected=self.core.settings.run_id, got=run_id)

    async def watch_routes(
        self, run_id: str, model: ModelName, *, kept: bool
    ) -> AsyncIterator[fleet_pb2.WatchRoutesResponse]:
        self.check_run(run_id)
        async with self._lock:  # INV-9: between two events all that the core knows is in the ledger
            topic = self._routes.get((model, kept))
            if topic is None:
                topic = self._routes[model, kept] = Latest(views.routes(self.core, model, 0, kept=kept))
                self._publish_routes(model, kept=kept)
        async for routes in topic.watch():
            yield routes

    def find_update(self, update_id: UpdateId) -> UpdateTransaction:
        """Raises UnknownUpdate."""
        found = self.core.updates.get(update_id)
        if found is None:
            raise UnknownUpdate(update_id=update_id)
        return found

    def watch_update(self, run_id: RunId, update_id: UpdateId) -> AsyncIterator[fleet_pb2.UpdateState]:
        self.check_run(run_id)
        topic = self._updates.get(update_id)
        if topic is None:
            raise UnknownUpdate(update_id=update_id)
        return topic.watch()


def _in_short(record: Any) -> str:
    """For the log, which has a line for each of three records of every update: of a large fleet it names the first."""
    more = 0
    for name in {"engines", "outcomes"} & {f.name for f in fields(record)}:
        named = getattr(record, name)
        more = max(0, len(named) - MAX_ENGINES_LOGGED)
        record = replace(record, **{name: named[:MAX_ENGINES_LOGGED]})
    return f"{record} and {more} more" if more else str(record)


def _no_carrier(carry: Carry) -> None:
    raise AssertionError(f"nobody brings {carry.version} to {carry.engine.engine_id}")
