"""The coordinator's decisions: sessions, leases, plans, updates, what is served, who is routable.

`FleetCore.handle(event, now)` takes what happened and returns what to do, in order; records to be written come before
anything that tells of them. It does no I/O, and knows no clock and no randomness: ids come in with the events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from controlplane.core import errors as e
from controlplane.core.engine_state import EngineState, Held, Life
from controlplane.core.fleet_events import (
    AbortRequested,
    BroadcastState,
    CloseSession,
    Effect,
    EngineConnected,
    EngineReported,
    Event,
    Paused,
    Save,
    SessionEnded,
    Tick,
    TrainerConnected,
    TrainerReported,
    UpdateChanged,
    UpdatePlanned,
    UpdateRequested,
    ViewChanged,
    Welcome,
)
from controlplane.core.fleet_records import (
    EngineAsked,
    EngineForgotten,
    EngineKnown,
    EngineRecord,
    ModelRecord,
    Recovered,
    TermGiven,
    TrainerRecord,
    UpdateBegan,
    UpdateDecided,
    UpdateRolled,
    UpdateWentGo,
)
from controlplane.core.plan import Plan, Transport, check_fit, make_plan
from controlplane.core.update_transaction import Outcome, Phase, UpdatePolicy, UpdateTransaction
from controlplane.core.versions import (
    EngineId,
    ModelName,
    RunId,
    Term,
    UpdateId,
    WeightVersion,
)

MAX_UPDATES_KEPT = 64
"""Decided updates kept in memory for watchers and people; the ledger has them all."""


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Times and limits of a fleet."""

    run_id: RunId
    """The run that every caller must name."""
    lease_ttl_seconds: float = 10.0
    """Silence after which an agent is UNKNOWN and a lease may be taken over."""
    step_limit_seconds: float = 3600.0
    """A lease is renewed only while the trainer's step or phase moves within this time."""
    ready_limit_seconds: float = 300.0
    """Longest time from begin to go."""
    go_limit_seconds: float = 120.0
    """Longest time from go to the last required outcome."""
    policy: UpdatePolicy = field(default_factory=UpdatePolicy)
    """What an update needs to go and to commit."""
    transport: Transport | None = None
    """Use this transport whatever the plan would choose."""


class FleetCore:
    """The decisions of one coordinator's life."""

    def __init__(self, settings: FleetSettings, recovered: Recovered, now: float) -> None:
        self.settings = settings
        self.term = recovered.coordinator_term
        self.models: dict[ModelName, ModelRecord] = dict(recovered.models)
        self.engines: dict[EngineId, EngineRecord] = {}
        self.trainers: dict[ModelName, TrainerRecord] = {}
        self.updates: dict[UpdateId, UpdateTransaction] = {}
        self.revision = 0
        self._next_number = recovered.next_number
        self._plan_revision = 0
        self._awaited = {k.engine_id for k in recovered.engines}
        self._regressed: set[EngineId] = set()
        self._highest_term_seen = Term(0)
        self._recovery_ends_at = now + settings.lease_ttl_seconds
        for lease in recovered.leases:
            self._restore_lease(lease, now)
        for began, went_go in recovered.open_updates:
            self._restore_update(began, went_go, began.update_id in recovered.rolled, now)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Decide. Raises a `Refused` with nothing changed. `now`: monotonic seconds."""
        effects = _HANDLERS[type(event)](self, event, now)
        # INV-9: what is told is read from this state, so all of its records are written first.
        return sorted(effects, key=lambda effect: not isinstance(effect, Save))

    # ---- reading ----

    @property
    def recovering(self) -> bool:
        """After a restart: some engine that the ledger knows has not reported yet; or one reported a number that the
        ledger never gave, so that the ledger is an older copy."""
        return bool(self._awaited or self._regressed)

    def model(self, name: ModelName) -> ModelRecord:
        return self.models.setdefault(name, ModelRecord())

    def routable(self, record: EngineRecord) -> bool:
        """INV-10: gate open, session alive, and it holds what the fleet serves."""
        applied = record.state.applied
        return (
            record.session is not None
            and record.gate_open
            and applied is not None
            and applied in self.model(record.state.model).served
        )

    def open_update(self, model: ModelName) -> UpdateTransaction | None:
        return next((u for u in self.updates.values() if u.model == model and not u.phase.final), None)

    # ---- engines ----

    def _engine_connected(self, event: EngineConnected, now: float) -> list[Effect]:
        self._check_run(event.state.run_id)
        if event.max_coordinator_term > self.term:
            raise e.StaleTerm(model="(coordinator)", got=self.term, current=event.max_coordinator_term)
        trainer = self.trainers.get(event.state.model)
        if trainer is not None and trainer.session is not None:
            check_fit(event.place, trainer.ranks)
        old = self.engines.get(event.place.engine_id)
        effects: list[Effect] = []
        if old is None:
            effects.append(Save(EngineKnown(event.place.engine_id, event.state.model)))
        elif old.session is not None:
            effects.append(CloseSession(old.session, self._why_replaced(old.state, event.state)))
        self.engines[event.place.engine_id] = EngineRecord(
            event.place, event.state, event.session, now, event.capabilities, event.gate_open
        )
        self._awaited.discard(event.place.engine_id)
        if event.max_number >= self._next_number or event.max_term > self.model(event.state.model).term:
            self._regressed.add(event.place.engine_id)
        self._highest_term_seen = max(self._highest_term_seen, event.max_term)
        self.model(event.state.model)
        return [*effects, Welcome(event.session, Term(0)), *self._after_report(event.state, now)]

    def _why_replaced(self, old: EngineState, new: EngineState) -> e.WeightplaneError:
        """L2: another life took its place, which the old one must hear. The same life on a new connection loses nothing
        but the old connection."""
        if old.incarnation == new.incarnation:
            return e.PeerLost(peer=old.engine_id, cause="the same life opened a newer session")
        return e.WrongIncarnation(engine_id=old.engine_id, expected=new.incarnation, got=old.incarnation)

    def _engine_reported(self, event: EngineReported, now: float) -> list[Effect]:
        record = self._by_session(event.session)
        if record is None:
            return []
        if event.state.incarnation != record.state.incarnation:
            raise e.WrongIncarnation(
                engine_id=record.place.engine_id, expected=record.state.incarnation, got=event.state.incarnation
            )
        same = (record.state, record.gate_open) == (event.state, event.gate_open)
        record.state, record.gate_open, record.reported_at = event.state, event.gate_open, now
        return [] if same else self._after_report(event.state, now)

    def _after_report(self, state: EngineState, now: float) -> list[Effect]:
        for update in self.updates.values():
            if not update.phase.final:
                update.note(state)
        return [ViewChanged(), *self._advance(state.model, now)]

    def _by_session(self, session: int) -> EngineRecord | None:
        return next((r for r in self.engines.values() if r.session == session), None)

    # ---- trainers ----

    def _trainer_connected(self, event: TrainerConnected, now: float) -> list[Effect]:
        self._check_run(event.run_id)
        model = self.model(event.model)
        holder = self.trainers.get(event.model)
        for record in self.engines.values():
            if record.state.model == event.model and record.session is not None:
                check_fit(record.place, event.ranks)
        if holder is not None and event.held_term == holder.term and event.incarnation == holder.incarnation:
            return self._resume_lease(holder, event, now)
        if event.held_term:
            raise e.StaleTerm(model=event.model, got=event.held_term, current=model.term)
        self._check_takeover(holder, event, now)
        return self._give_lease(model, holder, event, now)

    def _check_takeover(self, holder: TrainerRecord | None, event: TrainerConnected, now: float) -> None:
        if holder is None or event.takeover or now >= holder.expires_at:
            return
        same_agent = holder.trainer_id == event.trainer_id and holder.incarnation == event.ended_incarnation
        if not same_agent:
            raise e.LeaseHeld(
                model=event.model,
                holder=holder.trainer_id,
                incarnation=holder.incarnation,
                term=holder.term,
                remaining_seconds=round(holder.expires_at - now, 1),
            )

    def _give_lease(
        self, model: ModelRecord, holder: TrainerRecord | None, event: TrainerConnected, now: float
    ) -> list[Effect]:
        """A new term (INV-7): in the ledger first; the older holder is fenced, its update ends unless it went go."""
        model.term = Term(max(model.term, self._highest_term_seen) + 1)
        effects: list[Effect] = [
            Save(TermGiven(event.model, model.term, event.trainer_id, event.incarnation)),
            Welcome(event.session, model.term),  # its first frame: states are broadcast below
        ]
        if holder is not None and holder.session is not None:
            error = e.StaleTerm(model=event.model, got=holder.term, current=model.term)
            effects.append(CloseSession(holder.session, error))
        self.trainers[event.model] = TrainerRecord(
            event.trainer_id,
            event.incarnation,
            event.model,
            model.term,
            event.ranks,
            event.session,
            expires_at=now + self.settings.lease_ttl_seconds,
            progressed_at=now,
        )
        self._plan_revision += 1
        update = self.open_update(event.model)
        if update is not None and update.phase is Phase.PREPARING:
            effects += self._finish(update, Phase.FAILED, f"fenced by term {model.term}")
        self.revision += 1
        return [*effects, BroadcastState(), ViewChanged()]

    def _resume_lease(self, holder: TrainerRecord, event: TrainerConnected, now: float) -> list[Effect]:
        holder.session, holder.ranks = event.session, event.ranks
        self._renew(holder, now)
        return [Welcome(event.session, holder.term), ViewChanged()]

    def _trainer_reported(self, event: TrainerReported, now: float) -> list[Effect]:
        holder = next((t for t in self.trainers.values() if t.session == event.session), None)
        if holder is None:
            return []
        moved = event.progress > holder.progress
        if moved:
            holder.progress, holder.progressed_at = event.progress, now
        if now - holder.progressed_at <= self.settings.step_limit_seconds:
            self._renew(holder, now)
        seen = (holder.step, holder.phase) != (event.step, event.phase)
        holder.step, holder.phase = event.step, event.phase
        return [ViewChanged()] if seen else []

    def _renew(self, holder: TrainerRecord, now: float) -> None:
        holder.expires_at = now + self.settings.lease_ttl_seconds

    # ---- sessions ----

    def _session_ended(self, event: SessionEnded, now: float) -> list[Effect]:
        for trainer in self.trainers.values():
            if trainer.session == event.session:
                trainer.session = None
                if event.goodbye:
                    trainer.expires_at = now  # it left on purpose: nobody need wait for its lease
                return [ViewChanged()]
        record = self._by_session(event.session)
        if record is None:
            return []
        record.session, record.gate_open = None, False  # INV-8: silence is UNKNOWN, and UNKNOWN is not routable
        effects: list[Effect] = [ViewChanged()]
        if event.goodbye:
            del self.engines[record.place.engine_id]
            effects.append(Save(EngineForgotten(record.place.engine_id)))
            self._lose(record.place.engine_id, "it left")
        return [*effects, *self._advance(record.state.model, now)]

    def _paused(self, event: Paused, now: float) -> list[Effect]:
        """Every limit that ran meanwhile gets the time back: what came is still unread, what was due was not done."""
        self._recovery_ends_at += event.seconds
        for engine in self.engines.values():
            engine.reported_at += event.seconds
        for trainer in self.trainers.values():
            trainer.expires_at += event.seconds
            trainer.progressed_at += event.seconds
        for update in self.updates.values():
            update.deadline += event.seconds
        return []

    def _tick(self, event: Tick, now: float) -> list[Effect]:
        effects: list[Effect] = [ViewChanged()]  # also heartbeats that changed nothing make what is known younger
        if self._awaited and now >= self._recovery_ends_at:
            self._awaited.clear()
        for record in self.engines.values():
            if record.session is not None and now - record.reported_at > self._ttl:
                stopped = e.PeerLost(peer=record.place.engine_id, cause="no report within the lease's time")
                effects.append(CloseSession(record.session, stopped))
                record.session, record.gate_open = None, False
        for model in list(self.models):
            effects += self._advance(model, now)
        return effects

    def _lose(self, engine_id: EngineId, cause: str) -> None:
        for update in self.updates.values():
            if not update.phase.final:
                update.lose(engine_id, cause)

    # ---- updates ----

    def _update_requested(self, event: UpdateRequested, now: float) -> list[Effect]:
        self._check_run(event.run_id)
        self._check_term(event.model, event.term)
        if self.recovering:
            raise e.CoordinatorRecovering(term=self.term, engines=sorted(self._awaited | self._regressed))
        repeated = next((u for u in self.updates.values() if u.request_id == event.request_id), None)
        if repeated is not None:
            return [UpdatePlanned(repeated)]
        current = self.open_update(event.model)
        if current is not None:
            raise e.UpdateInProgress(update_id=current.update_id, version=str(current.version))
        plan = self._plan(event.model)
        limit = event.ready_limit_seconds or self.settings.ready_limit_seconds
        update = UpdateTransaction(
            update_id=event.update_id,
            request_id=event.request_id,
            model=event.model,
            version=WeightVersion(self._next_number, event.term),
            term=event.term,
            step=event.step,
            plan=plan,
            deadline=now + min(limit, self.settings.ready_limit_seconds),
            policy=self.settings.policy,
            outcomes={
                a.engine.engine_id: Outcome(a.engine.engine_id, a.engine.incarnation, a.required)
                for a in plan.assignments
            },
        )
        self._next_number += 1
        self._keep(update)
        return [Save(_began(update)), UpdatePlanned(update), UpdateChanged(update.update_id), ViewChanged()]

    def _plan(self, model: ModelName) -> Plan:
        """Fixes who is required: the routable; if none is, every live engine. The other live ones are optional."""
        live = [
            r
            for r in self.engines.values()
            if r.state.model == model and r.session is not None and r.state.life is Life.RUNNING
        ]
        if not live:
            raise e.NoEngines(model=model, known=sum(r.state.model == model for r in self.engines.values()))
        required = frozenset(r.place.engine_id for r in live if self.routable(r))
        everyone = frozenset(r.place.engine_id for r in live)
        trainer = self.trainers[model]
        if not trainer.ranks:  # a restart knows the lease, but not yet whose devices are whose
            raise e.CoordinatorRecovering(term=self.term, engines=[f"trainer {trainer.trainer_id}"])
        return make_plan(
            self._plan_revision, [r.place for r in live], required or everyone, trainer.ranks, self.settings.transport
        )

    def _abort_requested(self, event: AbortRequested, now: float) -> list[Effect]:
        self._check_run(event.run_id)
        update = self.updates.get(event.update_id)
        if update is None:
            raise e.UnknownUpdate(update_id=event.update_id)
        self._check_term(update.model, event.term)
        if update.phase is Phase.GO:
            raise e.FrameOutOfOrder(expected="a decision from the engines' reports", got="abort after go")
        if update.phase.final:
            return []
        return self._finish(update, Phase.FAILED, event.reason or "given up by the trainer")

    def _advance(self, model: ModelName, now: float) -> list[Effect]:
        """Go and decide, as far as what is known allows."""
        effects: list[Effect] = []
        update = self.open_update(model)
        while update is not None and not update.phase.final:
            self._lose_the_silent(update, now)
            if update.may_roll:
                effects += self._roll(update)
            step = update.next_phase(now, served_has_holder=self._served_has_holder(model))
            if step is None:
                break
            phase, cause = step
            if phase is Phase.GO:
                update.phase, update.deadline = Phase.GO, now + self.settings.go_limit_seconds
                effects += [Save(UpdateWentGo(update.update_id)), UpdateChanged(update.update_id), ViewChanged()]
            else:
                effects += self._finish(update, phase, cause)
        if update is not None and not effects:
            effects.append(UpdateChanged(update.update_id))
        return effects

    def _lose_the_silent(self, update: UpdateTransaction, now: float) -> None:
        """INV-9: a decision rests on engines that are alive at it; ticks may be late, after a pause of this process."""
        for outcome in list(update.outcomes.values()):
            record = self.engines.get(outcome.engine_id)
            heard_at = record.reported_at if record is not None else self._recovery_ends_at - self._ttl
            if now - heard_at > self._ttl:
                update.lose(outcome.engine_id, "silent for longer than the lease's time")

    @property
    def _ttl(self) -> float:
        return self.settings.lease_ttl_seconds

    def _roll(self, update: UpdateTransaction) -> list[Effect]:
        """Serve the new version beside the old one, from its first engine on: in the ledger before anyone is told."""
        model = self.model(update.model)
        update.rolled = True
        model.served, model.ordinal = (*model.served[-1:], update.version), model.ordinal + 1
        self.revision += 1
        rolled = UpdateRolled(update.update_id, update.model, model.served, model.ordinal)
        return [Save(rolled), BroadcastState(), UpdateChanged(update.update_id), ViewChanged()]

    def _finish(self, update: UpdateTransaction, phase: Phase, cause: str) -> list[Effect]:
        """Decide: in the ledger before anyone is told (INV-9)."""
        model = self.model(update.model)
        update.phase, update.cause = phase, cause
        if phase in (Phase.COMMITTED, Phase.DEGRADED):
            model.served, model.ordinal = self._served_after(update), model.ordinal + (not update.rolled)
            self.revision += 1
        decided = UpdateDecided(update.update_id, update.model, phase, cause, model.served, model.ordinal)
        return [Save(decided), BroadcastState(), UpdateChanged(update.update_id), ViewChanged()]

    def _served_after(self, update: UpdateTransaction) -> tuple[WeightVersion, ...]:
        """The new version alone; but while nobody alive holds it any more, what was served beside it too."""
        held = any(
            r.session is not None and r.state.applied == update.version
            for r in self.engines.values()
            if r.state.model == update.model
        )
        return (update.version,) if held or not update.rolled else self.model(update.model).served

    def _served_has_holder(self, model: ModelName) -> bool:
        served = self.model(model).served
        return any(
            r.session is not None and isinstance(r.state.weights, Held) and r.state.weights.version in served
            for r in self.engines.values()
            if r.state.model == model
        )

    # ---- helpers ----

    def _check_run(self, run_id: RunId) -> None:
        if run_id != self.settings.run_id:
            raise e.WrongRun(expected=self.settings.run_id, got=run_id)

    def _check_term(self, model: ModelName, term: Term) -> None:
        """INV-7: only the present term writes."""
        current = self.model(model).term
        if term != current or model not in self.trainers:
            raise e.StaleTerm(model=model, got=term, current=current)

    def _keep(self, update: UpdateTransaction) -> None:
        self.updates[update.update_id] = update
        decided = [u.update_id for u in self.updates.values() if u.phase.final]
        for update_id in decided[: max(0, len(self.updates) - MAX_UPDATES_KEPT)]:
            del self.updates[update_id]

    def _restore_lease(self, lease: TermGiven, now: float) -> None:
        """The lease's time starts afresh; its holder may resume it."""
        self.trainers[lease.model] = TrainerRecord(
            lease.trainer_id,
            lease.incarnation,
            lease.model,
            lease.term,
            (),
            None,
            expires_at=now + self.settings.lease_ttl_seconds,
            progressed_at=now,
        )

    def _restore_update(self, began: UpdateBegan, went_go: bool, rolled: bool, now: float) -> None:
        """Without go in the ledger it is aborted at the first tick; with go it is decided from reports."""
        update = UpdateTransaction(
            update_id=began.update_id,
            request_id=began.request_id,
            model=began.model,
            version=began.version,
            term=began.version.term,
            step=began.step,
            plan=Plan(0, ()),
            deadline=now + self.settings.go_limit_seconds if went_go else now,
            policy=self.settings.policy,
            phase=Phase.GO if went_go else Phase.PREPARING,
            doomed=not went_go,
            rolled=rolled,
            outcomes={
                a.engine_id: Outcome(a.engine_id, a.incarnation, a.required, group=a.group, unit=a.unit)
                for a in began.engines
            },
        )
        self.updates[update.update_id] = update


def _began(update: UpdateTransaction) -> UpdateBegan:
    return UpdateBegan(
        update.update_id,
        update.request_id,
        update.model,
        update.version,
        update.step,
        tuple(EngineAsked(o.engine_id, o.incarnation, o.required, o.group, o.unit) for o in update.outcomes.values()),
    )


_HANDLERS: Mapping[type, Callable[[FleetCore, Any, float], list[Effect]]] = {
    EngineConnected: FleetCore._engine_connected,
    EngineReported: FleetCore._engine_reported,
    TrainerConnected: FleetCore._trainer_connected,
    TrainerReported: FleetCore._trainer_reported,
    SessionEnded: FleetCore._session_ended,
    UpdateRequested: FleetCore._update_requested,
    AbortRequested: FleetCore._abort_requested,
    Paused: FleetCore._paused,
    Tick: FleetCore._tick,
}
