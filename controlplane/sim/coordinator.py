"""The coordinator's process: `FleetCore` with a ledger's disk and its calls, as the hub carries them, on `sessions`.

One event at a time; effects in order; a record is on the disk before anything after it is told. A crash loses
what was not synced, every session and every call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from controlplane.core import errors as e
from controlplane.core import fleet_effects as fx
from controlplane.core import fleet_events as fe
from controlplane.core.fleet import FleetSettings
from controlplane.core.plan import Plan
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import EngineId, UpdateId, WeightVersion
from controlplane.sim.agent import Agent
from controlplane.sim.carrier import Carrier
from controlplane.sim.kernel import Crashed, Stream
from controlplane.sim.sessions import Sessions
from controlplane.sim.surroundings import Surroundings


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


class Coordinator(Sessions):
    """One host's coordinator, life after life."""

    def __init__(self, around: Surroundings, agents: Mapping[str, Agent]) -> None:
        """`agents`: whom it carries checkpoints to, by name."""
        super().__init__(around, "coordinator")
        self.carrier = Carrier(self, agents)
        self._watches: dict[UpdateId, list[Watch]] = {}
        self._next_update = 0
        self._handled_at = 0.0

    def boot(self) -> None:
        s = self.around.settings
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
            policy=self.around.policy,
        )
        recovered = self.ledger.open(s.run_id)
        self.around.witness.coordinator_began(self, recovered.coordinator_term)
        self.core = s.fleet_core(fleet, recovered, self.kernel.now)
        self._handled_at = self.kernel.now
        self.after(s.tick, self._tick)

    def _tick(self) -> None:
        self.after(self.around.settings.tick, self._tick)
        self.handle(fe.Tick())

    def new_update_id(self) -> UpdateId:
        """Made here, as the service makes it; unique over lives."""
        self._next_update += 1
        return UpdateId(f"u{self._next_update}")

    # ---- events ----

    def handle(self, event: fe.Event) -> list[fx.Effect]:
        """Decide and carry out. Raises the core's refusals."""
        self._notice_own_pause()
        try:
            effects = self.core.handle(event, self.kernel.now)
        except e.WeightplaneError as error:
            self.around.witness.refused(error)
            self.around.coverage.fleet_events[type(event).__name__] += 1
            raise
        self._all_carried_out(event, effects)
        return effects

    def _all_carried_out(self, event: fe.Event, effects: list[fx.Effect]) -> None:
        """A ledger that cannot write ends the coordinator: it never tells of what is not written."""
        self.around.witness.fleet(self, event, effects)
        try:
            for effect in effects:
                self._carry_out(effect)
        except e.LedgerError as error:
            self.around.witness.refused(error)
            self.crash()
            raise Crashed from error

    def _notice_own_pause(self) -> None:
        """As the daemon's hub does: ticks come often, so a long gap is a pause of this process."""
        gap, self._handled_at = self.kernel.now - self._handled_at, self.kernel.now
        if gap > self.around.settings.lease_ttl * PAUSE_SHARE:
            self.around.coverage.fleet_events[fe.Paused.__name__] += 1
            self.core.handle(fe.Paused(gap), self.kernel.now)
            self.around.witness.coordinator_paused(gap)

    def _carry_out(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Save(record):
                self.ledger.save(record)
                self.around.witness.saved(self, record)
                self.around.faults.point(self, "coordinator.after_save")
            case fx.Welcome(session, term):
                self.welcome(session, term)
            case fx.CloseSession(session, error):
                self.close(session, error)
            case fx.BroadcastState():
                self.broadcast()
            case fx.UpdateChanged(update_id):
                self._tell_watches(update_id)
                self.carrier.update_changed(update_id)
            case fx.StartCarry(carry):
                self.around.witness.carries(self, carry)
                self.carrier.start(carry)
            case _:
                pass  # UpdatePlanned answers its caller; views are read when somebody asks

    # ---- updates that are watched ----

    def _tell_watches(self, update_id: UpdateId) -> None:
        for watch in self._watches.get(update_id, ()):
            self._tell(update_id, watch)

    def _tell(self, update_id: UpdateId, watch: Watch) -> None:
        update = self.core.updates[update_id]
        phase = update.phase
        if watch.last is phase:
            return
        watch.last = phase
        self.around.witness.told_phase(self, update_id, phase)
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
        update = next(x.update for x in effects if isinstance(x, fx.UpdatePlanned))
        self.around.witness.told_plan(self, request.request_id, update)
        if isinstance(request, fe.UpdateRequested):
            self.around.witness.told_ways(update.plan, request.avoid)
        begun = Begun(update.update_id, update.version, update.plan)
        stream.to_client(lambda: answer(begun))

    def call(self, stream: Stream, event: fe.Event) -> list[fx.Effect] | None:
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
            self.around.witness.refused(error)
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
            self.around.witness.gives_route(self, engine_id)
        stream.to_client(lambda: answer(found))
