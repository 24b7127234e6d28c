"""The coordinator's process: `FleetCore` with a ledger's disk, sessions and calls, as the hub carries them.

One event at a time; effects in order; a record is on the disk before anything after it is told. A crash loses
what was not synced, every session and every call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from controlplane.core import errors as e
from controlplane.core import fleet_events as fe
from controlplane.core.engine_state import EngineState
from controlplane.core.fleet import FleetCore, FleetSettings
from controlplane.core.fleet_book import Doubt
from controlplane.core.plan import Plan
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import EngineId, ModelName, Term, UpdateId, WeightVersion
from controlplane.sim.carrier import Carrier
from controlplane.sim.disks import LedgerDisk
from controlplane.sim.kernel import Crashed, Process, Stream

if TYPE_CHECKING:
    from controlplane.sim.world import World


@dataclass(frozen=True, slots=True)
class ModelNews:
    name: ModelName
    term: Term
    served: tuple[WeightVersion, ...]


@dataclass(frozen=True, slots=True)
class FleetNews:
    """What a session is told."""

    coordinator_term: Term
    models: tuple[ModelNews, ...]
    doubts: Mapping[EngineId, Doubt]

    def model(self, name: ModelName) -> ModelNews | None:
        return next((m for m in self.models if m.name == name), None)


@dataclass
class Session:
    """An agent's stream. `welcomed` and `told` deliver frames at the agent."""

    stream: Stream
    welcomed: Callable[[FleetNews, Term], None]
    told: Callable[[FleetNews], None]
    number: int = 0
    greeted: bool = False
    """The agent had its welcome."""


@dataclass
class Watch:
    stream: Stream
    told: Callable[[Phase, frozenset[EngineId], frozenset[EngineId]], None]
    """The phase, who is lost, and who is awaited."""
    last: Phase | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """The answer to BeginUpdate."""

    update_id: UpdateId
    version: WeightVersion
    plan: Plan


PAUSE_SHARE = 0.5
"""Of the lease's time, as in `controlplane.coordinator.hub`."""


class Coordinator(Process):
    """One host's coordinator, life after life."""

    core: FleetCore

    def __init__(self, world: World) -> None:
        super().__init__(world.kernel, "coordinator")
        self.world = world
        self.ledger = LedgerDisk(lambda: world.faults.writing(self), lambda: world.kernel.now)
        self.carrier = Carrier(self)
        self.sessions: dict[int, Session] = {}
        self._watches: dict[UpdateId, list[Watch]] = {}
        self._next_session = 0
        self._next_update = 0
        self._handled_at = 0.0

    def boot(self) -> None:
        s = self.world.settings
        self.sessions.clear()
        self._watches.clear()
        self.carrier.forget()
        fleet = FleetSettings(
            s.run_id,
            lease_ttl_seconds=s.lease_ttl,
            step_limit_seconds=s.step_limit,
            ready_limit_seconds=s.ready_limit,
            go_limit_seconds=s.go_limit,
            await_limit_seconds=s.await_limit,
            policy=self.world.policy,
        )
        recovered = self.ledger.open(s.run_id)
        self.world.witness.coordinator_began(self, recovered.coordinator_term)
        self.core = s.fleet_core(fleet, recovered, self.kernel.now)
        self._handled_at = self.kernel.now
        self.after(s.tick, self._tick)

    def _tick(self) -> None:
        self.after(self.world.settings.tick, self._tick)
        self.handle(fe.Tick())

    def new_update_id(self) -> UpdateId:
        """Made here, as the service makes it; unique over lives."""
        self._next_update += 1
        return UpdateId(f"u{self._next_update}")

    # ---- events ----

    def handle(self, event: fe.Event) -> list[fe.Effect]:
        """Decide and carry out. Raises the core's refusals."""
        self._notice_own_pause()
        try:
            effects = self.core.handle(event, self.kernel.now)
        except e.WeightplaneError as error:
            self.world.witness.refused(error)
            self.world.coverage.fleet_events[type(event).__name__] += 1
            raise
        self._all_carried_out(event, effects)
        return effects

    def _all_carried_out(self, event: fe.Event, effects: list[fe.Effect]) -> None:
        """A ledger that cannot write ends the coordinator: it never tells of what is not written."""
        self.world.witness.fleet(self, event, effects)
        try:
            for effect in effects:
                self._carry_out(effect)
        except e.LedgerError as error:
            self.world.witness.refused(error)
            self.crash()
            raise Crashed from error

    def _notice_own_pause(self) -> None:
        """As the daemon's hub does: ticks come often, so a long gap is a pause of this process."""
        gap, self._handled_at = self.kernel.now - self._handled_at, self.kernel.now
        if gap > self.world.settings.lease_ttl * PAUSE_SHARE:
            self.world.coverage.fleet_events[fe.Paused.__name__] += 1
            self.core.handle(fe.Paused(gap), self.kernel.now)
            self.world.witness.coordinator_paused(gap)

    def _carry_out(self, effect: fe.Effect) -> None:
        match effect:
            case fe.Save(record):
                self.ledger.save(record)
                self.world.witness.saved(self, record)
                self.world.faults.point(self, "coordinator.after_save")
            case fe.Welcome(session, term):
                self._welcome(session, term)
            case fe.CloseSession(session, error):
                self._close(session, error)
            case fe.BroadcastState():
                self._broadcast()
            case fe.UpdateChanged(update_id):
                self._tell_watches(update_id)
                self.carrier.update_changed(update_id)
            case fe.StartCarry(carry):
                self.world.witness.carries(self, carry)
                self.carrier.start(carry)
            case _:
                pass  # UpdatePlanned answers its caller; views are read when somebody asks

    # ---- sessions ----

    def hello(self, session: Session, event: Callable[[int], fe.Event]) -> None:
        """The first frame of a session; `event` makes it, given the session's number."""
        self._next_session += 1
        number = session.number = self._next_session
        self.sessions[number] = session
        session.stream.on_server_end = lambda: self._ended(number)
        self.said(session, lambda: event(number))

    def said(self, session: Session, event: Callable[[], fe.Event]) -> None:
        """A frame. A refusal ends the session."""
        try:
            self.handle(event())
        except e.WeightplaneError as error:
            self._end(session, error)

    def report(self, session: Session, state: EngineState, gate_open: bool) -> None:
        number = self._number(session)
        if number is not None:
            self.said(session, lambda: fe.EngineReported(number, state, gate_open))

    def progress(self, session: Session, event: Callable[[int], fe.TrainerReported]) -> None:
        number = self._number(session)
        if number is not None:
            self.said(session, lambda: event(number))

    def goodbye(self, session: Session) -> None:
        number = self._number(session)
        if number is not None:
            self.sessions.pop(number)
            session.stream.refuse(e.PeerLost(peer="the agent", cause="it said goodbye"))
            self.handle(fe.SessionEnded(number, goodbye=True))

    def _number(self, session: Session) -> int | None:
        return session.number if self.sessions.get(session.number) is session else None

    def _end(self, session: Session, error: e.WeightplaneError) -> None:
        number = self._number(session)
        session.stream.refuse(error)
        if number is not None:
            self.after(0.0, lambda: self._ended(number))

    def _close(self, number: int, error: e.WeightplaneError) -> None:
        session = self.sessions.get(number)
        if session is not None:
            self.world.witness.refused(error)
            self._end(session, error)

    def _ended(self, number: int) -> None:
        if self.sessions.pop(number, None) is not None:
            self.handle(fe.SessionEnded(number, goodbye=False))

    # ---- telling ----

    def news(self, session: int) -> FleetNews:
        models = tuple(
            ModelNews(n, m.term, self.core.served_to(session, n)) for n, m in sorted(self.core.models.items())
        )
        return FleetNews(self.core.term, models, dict(self.core.doubts))

    def _welcome(self, number: int, term: Term) -> None:
        session, news = self.sessions.get(number), self.news(number)
        self.world.witness.told_state(self, number, news)
        if term:
            self.world.witness.told_term(self, number, term)
        if session is not None:
            session.stream.to_client(lambda: session.welcomed(news, term))

    def _broadcast(self) -> None:
        for number, session in self.sessions.items():
            if session.stream.broken:  # its end is being told
                continue
            news = self.news(number)
            self.world.witness.told_state(self, number, news)
            session.stream.to_client(lambda told=session.told, news=news: told(news))  # type: ignore[misc]

    def _tell_watches(self, update_id: UpdateId) -> None:
        for watch in self._watches.get(update_id, ()):
            self._tell(update_id, watch)

    def _tell(self, update_id: UpdateId, watch: Watch) -> None:
        update = self.core.updates[update_id]
        phase = update.phase
        if watch.last is phase:
            return
        watch.last = phase
        self.world.witness.told_phase(self, update_id, phase)
        lost = frozenset(o.engine_id for o in update.outcomes.values() if o.lost)
        awaited = frozenset(o.engine_id for o in update.outcomes.values() if o.awaited)
        watch.stream.to_client(lambda: watch.told(phase, lost, awaited))

    # ---- calls ----

    def begin(
        self, stream: Stream, request: fe.UpdateRequested | fe.RollbackRequested, answer: Callable[[Begun], None]
    ) -> None:
        effects = self.call(stream, request)
        if effects is None:
            return
        update = next(x.update for x in effects if isinstance(x, fe.UpdatePlanned))
        self.world.witness.told_plan(self, request.request_id, update)
        if isinstance(request, fe.UpdateRequested):
            self.world.witness.told_ways(update.plan, request.avoid)
        begun = Begun(update.update_id, update.version, update.plan)
        stream.to_client(lambda: answer(begun))

    def call(self, stream: Stream, event: fe.Event) -> list[fe.Effect] | None:
        """Decide a caller's event. None: it was refused, and the caller hears why."""
        try:
            return self.handle(event)
        except e.WeightplaneError as error:
            stream.refuse(error)
            return None

    def said_once(self, stream: Stream, event: fe.Event, answer: Callable[[], None]) -> None:
        """A call without contents in its answer."""
        if self.call(stream, event) is not None:
            stream.to_client(answer)

    def abort(self, stream: Stream, request: fe.AbortRequested, answer: Callable[[Phase], None]) -> None:
        if self.call(stream, request) is None:
            return
        phase = self.core.updates[request.update_id].phase
        stream.to_client(lambda: answer(phase))

    def watch(self, update_id: UpdateId, watch: Watch) -> None:
        if update_id not in self.core.updates:
            error = e.UnknownUpdate(update_id=update_id)
            self.world.witness.refused(error)
            watch.stream.refuse(error)
            return
        self._watches.setdefault(update_id, []).append(watch)
        watch.stream.on_server_end = lambda: self._unwatch(update_id, watch)
        self._tell(update_id, watch)

    def _unwatch(self, update_id: UpdateId, watch: Watch) -> None:
        watches = self._watches.get(update_id, [])
        if watch in watches:
            watches.remove(watch)

    def routes(self, stream: Stream, answer: Callable[[list[EngineId]], None]) -> None:
        """Everything routable now."""
        found = [i for i, r in sorted(self.core.engines.items()) if self.core.routable(r)]
        for engine_id in found:
            self.world.witness.gives_route(self, engine_id)
        stream.to_client(lambda: answer(found))
