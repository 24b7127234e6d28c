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
from controlplane.coordinator.outboxes import Outbox, Outboxes
from controlplane.coordinator.spans import trace_decided
from controlplane.coordinator.token_lags import TokenLags
from controlplane.coordinator.topics import Topics
from controlplane.core.errors import LedgerError, UnknownUpdate, WrongRun
from controlplane.core.fleet import FleetCore
from controlplane.core.fleet_effects import (
    BroadcastState,
    Carry,
    CloseSession,
    Effect,
    Save,
    StartCarry,
    UpdateChanged,
    UpdatePlanned,
    ViewChanged,
    Welcome,
)
from controlplane.core.fleet_events import (
    EngineReported,
    Event,
    Paused,
    Tick,
)
from controlplane.core.fleet_preview import Preview, preview
from controlplane.core.fleet_records import UpdateDecided
from controlplane.core.kept_stacks import StackShelf
from controlplane.core.plan import LinkFate, Transport
from controlplane.core.update_transaction import UpdateTransaction
from controlplane.core.versions import ModelName, RunId, UpdateId
from controlplane.ledger import Ledger
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


class Hub:
    """The coordinator's one writer."""

    def __init__(self, core: FleetCore, ledger: Ledger, writer: ThreadPoolExecutor, heartbeat_seconds: float) -> None:
        self.core = core
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
        self._outboxes = Outboxes(core, heartbeat_seconds)
        self._topics = Topics(core, self.clock_shift)
        self.ticks = 0
        """Ticks that went through the core and the ledger: what its watchdog is fed from."""
        self._handled_at = time.monotonic()

    # ---- sessions ----

    def new_session(self) -> tuple[int, Outbox]:
        return self._outboxes.open()

    def drop_session(self, session: int) -> None:
        self._outboxes.drop(session)

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
                    self._topics.gate_opened(event.session)
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
            self._publish_together(self._told, self._topics.publish, TOGETHER_SECONDS),
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
                    self._outboxes.greet(session, term)
                case CloseSession(session, error):
                    self._outboxes.end(session, error)
                case BroadcastState():
                    self._outboxes.broadcast()
                case StartCarry(carry):
                    self.start_carry(carry)
                case UpdateChanged(update_id):
                    self._topics.update_changed(self.core.updates[update_id])
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
            topic = self._topics.routes(model, kept=kept)
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
        topic = self._topics.update(update_id)
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
