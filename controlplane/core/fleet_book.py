"""What one coordinator knows: engines, trainers, models, updates; and the questions that every decision asks.

Only the functions of the `fleet_*` modules beside it write here, called by `FleetCore.handle`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from controlplane.core import errors as e
from controlplane.core.canary import Range
from controlplane.core.conditions import dated, fleet_conditions
from controlplane.core.engine_state import Held
from controlplane.core.fleet_effects import Carry
from controlplane.core.fleet_records import (
    REQUEST_ID_SECONDS,
    EngineKept,
    EngineRecord,
    Judged,
    ModelRecord,
    Recovered,
    RequestKnown,
    TrainerRecord,
)
from controlplane.core.names import trainer_owner
from controlplane.core.plan import LinkFate, Transport
from controlplane.core.update_policy import UpdatePolicy
from controlplane.core.update_transaction import UpdateTransaction
from controlplane.core.versions import NO_TERM, EngineId, Incarnation, ModelName, RunId, Term, UpdateId, WeightVersion

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
    await_limit_seconds: float = 30.0
    """How long go waits for an engine that is not required and keeps missing updates."""
    policy: UpdatePolicy = field(default_factory=UpdatePolicy)
    """What an update needs to go and to commit."""
    canary_tolerance: float = 0.05
    """Largest difference between log probabilities that equal engines give of one prompt under the same bytes: in
    bfloat16 up to 0.03 was seen, where one engine had more requests in its batch than another."""
    transport: Transport | None = None
    """Use this transport, where it is possible, whatever the plan would choose."""
    link_fate: LinkFate = LinkFate.SHARED
    """Whose failure ends whose bytes on broadcast links."""
    max_carries: int = 4
    """Engines that the coordinator brings up to date from checkpoints at once."""


@dataclass
class Seen:
    """The highest that any agent told of: what a ledger must not be below."""

    number: int = 0
    coordinator_term: Term = NO_TERM
    terms: dict[ModelName, Term] = field(default_factory=dict)

    def note(self, number: int, coordinator_term: Term, model: ModelName, term: Term) -> None:
        self.number = max(self.number, number)
        self.coordinator_term = max(self.coordinator_term, coordinator_term)
        self.terms[model] = max(self.terms.get(model, NO_TERM), term)


@dataclass(frozen=True, slots=True)
class Request:
    """A request for an update that was answered."""

    known: RequestKnown
    answered_at: float


Unit = tuple[ModelName, str]
"""Units of two models may have one name."""


Alike = tuple[str, WeightVersion, bytes]
"""Likeness, version and content: engines that are the same in all three say the same."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """An engine whose canary equal ones contradict, until it says itself that it holds the version no more."""

    incarnation: Incarnation
    version: WeightVersion
    cause: str


@dataclass
class CarryTries:
    """How bringing an engine up to date went so far."""

    failures: int
    retry_at: float


class Book:
    """The state of a coordinator's life, with its reading."""

    def __init__(self, settings: FleetSettings, recovered: Recovered, now: float) -> None:
        self.settings = settings
        self.term = recovered.coordinator_term
        self.models: dict[ModelName, ModelRecord] = dict(recovered.models)
        self.engines: dict[EngineId, EngineRecord] = {}
        self.trainers: dict[ModelName, TrainerRecord] = {}
        self.updates: dict[UpdateId, UpdateTransaction] = {}
        self.revision = 0
        """Of what sessions are told."""
        self.plan_revision = 0
        self.next_number = recovered.next_number
        self.requests = {r.request_id: Request(r, now - r.age_seconds) for r in recovered.requests}
        self.awaited = {k.engine_id for k in recovered.engines}
        """Known engines that this life has not heard yet."""
        self.recovery_ends_at = now + settings.lease_ttl_seconds
        self.seen = Seen()
        self.above: dict[str, e.LedgerRegressed] = {}
        """By agent: what it has seen that the ledger never gave."""
        self.kept: dict[EngineId, EngineKept] = {k.engine_id: k for k in recovered.kept}
        """Engines that stay at a version; some may not be here now."""
        self.carries: dict[EngineId, Carry] = {}
        self.carry_tries: dict[EngineId, CarryTries] = {}
        self.carries_made = 0
        self.doubts: dict[EngineId, Doubt] = {}
        self.doubted_before: dict[EngineId, int] = {}
        """How often in a row."""
        self.agreed: set[EngineId] = set()
        """Engines whose canary is what a strict majority of equal ones says."""
        self.ranges: dict[ModelName, dict[Alike, Range]] = {}
        """How far apart the answers of equal engines are at most."""
        self.told: tuple[dict[Unit, tuple[WeightVersion, ...]], dict[ModelName, str]] = ({}, {})
        """The served set that a unit's members were told, and each model's holder of devices."""
        self._sessions: dict[int, EngineId] = {}
        self._units: dict[Unit, dict[EngineId, EngineRecord]] = {}

    # ---- identity ----

    def check_run(self, run_id: RunId) -> None:
        if run_id != self.settings.run_id:
            raise e.WrongRun(expected=self.settings.run_id, got=run_id)

    def check_term(self, model: ModelName, term: Term) -> None:
        """INV-7: only the present term writes."""
        current = self.model(model).term
        if term > current:  # a writer that knows more than the ledger is not fenced by it
            what = f"term of {model}"
            raise e.LedgerRegressed(what=what, known=current, seen=term, who="the caller")
        if term != current or model not in self.trainers:
            raise e.StaleTerm(model=model, got=term, current=current)

    def check_recovered(self) -> None:
        """Raises what keeps this coordinator from deciding anything new."""
        for regressed in self.above.values():
            raise regressed
        if self.awaited:
            raise e.CoordinatorRecovering(term=self.term, engines=sorted(self.awaited))

    @property
    def recovering(self) -> bool:
        """After a restart: some engine that the ledger knows has not reported yet; or an agent has seen what the
        ledger never gave, so that the ledger is an older copy."""
        return bool(self.awaited or self.above)

    # ---- engines ----

    def put(self, record: EngineRecord, session: int) -> None:
        """The engine's present life, in its present session."""
        self._leave_unit(record.place.engine_id)
        self.engines[record.place.engine_id] = record
        if record.place.unit:
            self._units.setdefault(_unit(record), {})[record.place.engine_id] = record
        self._sessions[session] = record.place.engine_id

    def forget(self, engine_id: EngineId) -> None:
        self._leave_unit(engine_id)
        del self.engines[engine_id]

    def _leave_unit(self, engine_id: EngineId) -> None:
        old = self.engines.get(engine_id)
        if old is not None and old.place.unit:
            members = self._units[_unit(old)]
            del members[engine_id]
            if not members:
                del self._units[_unit(old)]

    def of_session(self, session: int) -> EngineRecord | None:
        record = self.engines.get(self._sessions.get(session, EngineId("")))
        return record if record is not None and record.session == session else None

    def silence(self, record: EngineRecord) -> None:
        """INV-8: silence is UNKNOWN, and UNKNOWN is not routable."""
        if record.session is not None:
            self._sessions.pop(record.session, None)
        record.session, record.gate_open = None, False

    def of_model(self, model: ModelName) -> list[EngineRecord]:
        return [r for r in self.engines.values() if r.state.model == model]

    def unit(self, record: EngineRecord) -> list[EngineRecord]:
        """The engines that serve together with this one, itself included."""
        return list(self._units[_unit(record)].values()) if record.place.unit else [record]

    def routable(self, record: EngineRecord) -> bool:
        """INV-10: gate open, session alive, and it holds what the fleet serves; and so does its whole unit."""
        return all(self._open(r) for r in self.unit(record)) and record.state.applied in self.served_for(record)

    def _open(self, record: EngineRecord) -> bool:
        weights = record.state.weights
        if record.session is None or not record.gate_open or not isinstance(weights, Held):
            return False
        kept = self.kept_at(record)
        known = kept.content_digest if kept else self.model(record.state.model).digests.get(weights.version)
        return not known or known == weights.content_digest

    def served_for(self, record: EngineRecord) -> tuple[WeightVersion, ...]:
        """What this engine may serve. Of a unit: only what all of its members hold, for it has one gate."""
        served = self.wanted_of(record)
        if not record.place.unit:
            return served
        unit = self.unit(record)
        whole = len(unit) >= record.place.unit_size and all(r.live for r in unit)
        return tuple(v for v in served if whole and all(r.state.applied == v for r in unit))

    def kept_at(self, record: EngineRecord) -> EngineKept | None:
        """The version that it stays at while the fleet moves on. None: it goes with the fleet, as who turns out to be
        in a unit does, whatever was asked for before it came: a unit has one gate (INV-10)."""
        kept = self.kept.get(record.place.engine_id)
        return kept if kept is not None and kept.model == record.state.model and not record.place.unit else None

    def wanted_of(self, record: EngineRecord) -> tuple[WeightVersion, ...]:
        """What the fleet serves; of an engine that stays at a version, just that (INV-5: to it, that is what the fleet
        serves)."""
        kept = self.kept_at(record)
        return self.model(record.state.model).served if kept is None else (kept.version,)

    def serves_its_own(self, session: int) -> bool:
        """What this session is told may be other than what the fleet serves."""
        record = self.of_session(session)
        return record is not None and (bool(record.place.unit) or self.kept_at(record) is not None)

    def served_to(self, session: int, model: ModelName) -> tuple[WeightVersion, ...]:
        """What an agent is told that the fleet serves."""
        record = self.of_session(session)
        if record is None or record.state.model != model:
            return self.model(model).served
        return self.served_for(record)

    def must_tell(self) -> bool:
        """Whether some unit's members must be told another served set than they were, or some model's engines another
        holder of devices."""
        served = {unit: self.served_for(next(iter(members.values()))) for unit, members in self._units.items()}
        told = (served, {model: self.device_holder(model) for model in self.trainers})
        changed, self.told = told != self.told, told
        return changed

    def device_holder(self, model: ModelName) -> str:
        """Whose holds those are of engines that sleep for the model's trainer, while it holds devices, or may; else
        empty."""
        trainer = self.trainers.get(model)
        holds = trainer is not None and (trainer.holds_devices or trainer.devices_unknown)
        return trainer_owner(trainer.trainer_id) if trainer is not None and holds else ""

    def lent(self, record: EngineRecord) -> bool:
        """A trainer holds its devices, or may: nobody else wakes, heals or restarts it."""
        trainer = self.trainers.get(record.state.model)
        if trainer is None or not self.device_holder(record.state.model):
            return False
        return not trainer.ranks or any(r.device_uuid in record.place.device_uuids for r in trainer.ranks)

    def asleep_for_trainer(self, record: EngineRecord) -> bool:
        """It sleeps for its model's trainer, which holds its devices now, and for nobody else."""
        trainer = self.trainers.get(record.state.model)
        return trainer is not None and trainer.holds_devices and record.asleep_for(trainer_owner(trainer.trainer_id))

    def date_conditions(self, now: float) -> None:
        """What is true of each engine, for people, with the time since when."""
        for record in self.engines.values():
            judged = Judged(record.state, self.served_for(record), record.session is not None, self.routable(record))
            if judged != record.judged:
                served = frozenset(judged.served)
                fresh = fleet_conditions(record.state, served, known=judged.known, routable=judged.routable)
                record.judged, record.conditions = judged, dated(fresh, record.conditions, now)

    # ---- models and updates ----

    def model(self, name: ModelName) -> ModelRecord:
        return self.models.setdefault(name, ModelRecord())

    def open_update(self, model: ModelName) -> UpdateTransaction | None:
        newest_first = reversed(self.updates.values())
        return next((u for u in newest_first if u.model == model and not u.phase.final), None)

    def desired(self, record: EngineRecord) -> WeightVersion | None:
        """What the fleet wants this engine to hold: the open update's version once it went, else the newest served."""
        return self.desired_beside(record, self.open_update(record.state.model))

    def desired_beside(self, record: EngineRecord, update: UpdateTransaction | None) -> WeightVersion | None:
        """The same, where the open update is known."""
        if update is not None and update.went_go and record.place.engine_id in update.outcomes:
            return update.version
        return max(self.wanted_of(record), default=None)

    def holds_wanted(self, record: EngineRecord) -> bool:
        return record.state.applied in self.wanted_of(record)

    def served_has_holder(self, model: ModelName) -> bool:
        """Some live engine that goes with the fleet holds a version that the fleet serves."""
        return any(
            r.session is not None and self.kept_at(r) is None and self.holds_wanted(r) for r in self.of_model(model)
        )

    def keep(self, update: UpdateTransaction) -> None:
        self.updates[update.update_id] = update
        decided = [u.update_id for u in self.updates.values() if u.phase.final]
        for update_id in decided[: max(0, len(self.updates) - MAX_UPDATES_KEPT)]:
            del self.updates[update_id]

    def keep_request(self, request: RequestKnown, now: float) -> None:
        for old in self._outdated(now):
            del self.requests[old]
        self.requests[request.request_id] = Request(request, now)

    def _outdated(self, now: float) -> Iterable[str]:
        """They are in the order in which they were answered."""
        out = []
        for request_id, request in self.requests.items():
            if now - request.answered_at <= REQUEST_ID_SECONDS:
                break
            out.append(request_id)
        return out


def _unit(record: EngineRecord) -> Unit:
    return record.state.model, record.place.unit
