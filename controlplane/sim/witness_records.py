"""What the witness says of records: each is judged before it is written, and noted once it is on the disk (INV-9)."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from controlplane.core.engine_state import EngineState, Stage
from controlplane.core.fleet_records import (
    CheckpointGone,
    CheckpointKept,
    EngineKept,
    FloorRaised,
    FrozenServed,
    Record,
    TermGiven,
    UpdateBegan,
    UpdateDecided,
    UpdateRolled,
    UpdateWentGo,
)
from controlplane.core.plan import EnginePlace, RankPlace
from controlplane.core.update_outcomes import Outcome
from controlplane.core.update_policy import UpdatePolicy
from controlplane.core.update_transaction import Phase, UpdateTransaction
from controlplane.core.versions import FROZEN, EngineId, ModelName, Term, UpdateId, WeightVersion
from controlplane.sim.coverage import Coverage
from controlplane.sim.kernel import Kernel
from controlplane.sim.witness_base import Truth, Watched


@dataclass(frozen=True, slots=True)
class Delivered:
    """The last report of an engine that the coordinator took."""

    session: int
    place: EnginePlace
    state: EngineState
    gate_open: bool
    at: float


@dataclass(slots=True)
class Lent:
    """The last word of a trainer, whichever of the coordinator's lives it was said to."""

    session: int
    incarnation: str
    ranks: tuple[RankPlace, ...]
    holds: bool
    at: float


class RecordWitness(Truth):
    """Numbers and terms only grow, and decisions rest on what engines said."""

    def __init__(self, kernel: Kernel, coverage: Coverage, lease_ttl: float, policy: UpdatePolicy) -> None:
        super().__init__(kernel, coverage, lease_ttl, policy)
        self.delivered: dict[EngineId, Delivered] = {}
        self.engine_of: dict[int, EngineId] = {}
        """By session, of the present coordinator."""
        self.model_of: dict[int, ModelName] = {}
        """Of a trainer's session."""
        self.lent: dict[ModelName, Lent] = {}
        self.answers: dict[str, WeightVersion] = {}
        """By request id: the version that was written for it."""
        self.began_at = 0.0
        """When the coordinator's present life began."""
        self._highest_number = 0
        self._highest_terms: dict[ModelName, Term] = {}
        self._highest_coordinator = 0
        self._began_in: dict[UpdateId, int] = {}
        self._phases: dict[UpdateId, Phase] = {}
        self._asked: dict[UpdateId, dict[EngineId, str]] = {}
        """Who was required when the update began, and of which unit."""
        self.drained: dict[UpdateId, set[EngineId]] = {}
        """Who said that it drains, with nothing of the update in it."""

    @abstractmethod
    def holders(self, coordinator: Watched, update: UpdateTransaction) -> set[EngineId]: ...

    @abstractmethod
    def contradicted(self, coordinator: Watched, update: UpdateTransaction) -> set[EngineId]: ...

    def ledger_put_back(self, coordinator: Watched) -> None:
        """An older copy: what was decided since is open again."""
        self.ledger_restored = True
        decided = coordinator.ledger.kept.decided
        self.answers.clear()
        self._phases = {u: p for u, p in self._phases.items() if u in decided or not p.final}

    def coordinator_began(self, coordinator: Watched, term: Term) -> None:
        self.check(term > self._highest_coordinator or self.ledger_restored, "INV-7", f"coordinator term {term} again")
        self._highest_coordinator = max(term, self._highest_coordinator)
        self.disk, self.began_at = coordinator.ledger, self._kernel.now
        self.engine_of.clear()
        self.model_of.clear()

    # ---- before it is written ----

    def check_record_to_write(self, coordinator: Watched, record: Record) -> None:
        match record:
            case TermGiven():
                fresh = record.term > self._highest_terms.get(record.model, Term(0)) or self.ledger_restored
                self.check(fresh, "INV-7", f"term {record.term} is given twice")
            case UpdateBegan():
                self._check_began(coordinator, record)
            case UpdateWentGo():
                same_life = self._began_in.get(record.update_id) == coordinator.life
                self.check(same_life, "restart", f"{record.update_id} had no go when the coordinator died, and got one")
            case UpdateRolled():
                self._check_rolled(coordinator, coordinator.core.updates[record.update_id], record)
            case UpdateDecided():
                self._check_decision(coordinator, coordinator.core.updates[record.update_id], record)
            case CheckpointKept():
                known = self.truth.get((record.model, record.version))
                self.check(record.content_digest == known, "INV-6", f"{record} is not what was written")
            case FrozenServed():
                known = self.truth.get((record.model, FROZEN), record.content_digest)
                good = record.content_digest == known and self.loaded(record.model, known)
                self.check(good, "frozen", f"{record} is not what its engines loaded")
            case CheckpointGone():
                stays = coordinator.ledger.kept.stays.values()
                used = [k for k in stays if (k.model, k.version.number) == (record.model, record.number)]
                self.check(not used, "keeps", f"{record} is gone, where {used} may be needed")
            case EngineKept():
                known = self.truth.get((record.model, record.version))
                self.check(record.content_digest == known, "keeps", f"{record} is not what was written")
            case FloorRaised():
                self._check_floor(record)
            case _:
                pass

    def _check_began(self, coordinator: Watched, record: UpdateBegan) -> None:
        stays = coordinator.ledger.kept.stays
        wrong = [a.engine_id for a in record.engines if a.engine_id in stays and not a.unit]
        self.check(not wrong, "keeps", f"{record.update_id} goes to {wrong}, which stay at a version")
        number = record.version.number
        fresh = number > self._highest_number or self.ledger_restored
        self.check(fresh, "versions", f"number {number} is given after {self._highest_number}")
        current = self._highest_terms.get(record.model, Term(0))
        good = record.version.term == current or self.ledger_restored
        self.check(good, "INV-7", f"an update of term {record.version.term}, not {current}")
        if record.restores is not None:
            older = record.restores.number < number and (record.model, record.restores) in self.truth
            self.check(older, "INV-5", f"{record.version} brings {record.restores} back")
        given = self.answers.get(record.request_id)
        self.check(given is None, "requests", f"{record.request_id} was given {given}, and gets {record.version}")

    def _check_floor(self, record: FloorRaised) -> None:
        """Nothing that any agent remembers is ever given again."""
        terms = dict(record.terms)
        for agent in self._agents:
            number, model = agent.disk.synced.number, agent.spec.name
            good = record.number >= number and terms.get(model, 0) >= agent.seen_term
            good = good and record.coordinator_term > agent.seen_coordinator_term
            self.check(good, "INV-7", f"{record} is below what {agent.name} saw: {agent.disk.synced}")

    def _check_rolled(self, coordinator: Watched, update: UpdateTransaction, record: UpdateRolled) -> None:
        before = coordinator.ledger.kept.served.get(record.model, ())
        only = set(record.served) <= {*before[-1:], update.version} and update.version in record.served
        self.check(only, "INV-9", f"{record.update_id} rolls from {before} to {record.served}")
        holders = self.holders(coordinator, update)
        self.check(bool(holders), "INV-9", f"{record.update_id} rolls, and no live engine applied it")

    def _check_decision(self, coordinator: Watched, update: UpdateTransaction, record: UpdateDecided) -> None:
        """INV-9: by the reports of incarnations alive now, at least one; unless its version is served already."""
        rolled = record.update_id in coordinator.ledger.kept.rolled
        for outcome in record.outcomes:
            self.coverage.reasons.update([outcome.error_reason] if outcome.error_reason else [])
        if record.phase is Phase.FAILED:
            self.check(not rolled, "INV-9", f"{record.update_id} was served already, and is given up")
            return
        self.check(update.version in record.served, "INV-9", f"{record.update_id} serves {record.served}")
        holders = self.holders(coordinator, update)
        good = rolled or bool(holders)
        self.check(good, "INV-9", f"{record.update_id} is {record.phase.value}, and no live engine applied it")
        if record.content_digest:
            known = self.truth.get((record.model, update.version))
            self.check(record.content_digest == known, "INV-6", f"{record.update_id} is other content than was sent")
        trusted = {o.engine_id for o in record.outcomes if o.applied} & self.contradicted(coordinator, update)
        self.check(not trusted, "doubts", f"{record.update_id} counts {trusted}, whom equal engines contradict")
        if record.phase is Phase.COMMITTED:
            self._check_enough(update)

    def _check_enough(self, update: UpdateTransaction) -> None:
        """Whole units for the quorum, and of each of the model's groups what the policy wants."""
        self._check_left(update)
        policy, units = self._policy, _units(update.required)
        said = sum(all(o.stage is Stage.APPLIED for o in unit) for unit in units)
        needed = policy.needed(len(units))
        self.check(said >= needed, "INV-9", f"{update.update_id} is committed by {said} of {needed}")
        seats = [a.seat for a in self._agents if a.spec.name == update.model]
        for group in policy.min_engines.keys() & {s.group for s in seats}:
            count = sum(o.stage is Stage.APPLIED and o.group == group for o in update.outcomes.values())
            wanted = policy.min_engines[group]
            self.check(count >= wanted, "INV-9", f"{update.update_id} is committed by {count} of {wanted} of {group}")

    def _check_left(self, update: UpdateTransaction) -> None:
        """Who is required no more drained, by its own word or as the member of such a unit; and somebody is left."""
        asked, drained = self._asked.get(update.update_id, {}), self.drained.get(update.update_id, set())
        units = {asked[i] for i in drained if asked.get(i)}
        excused = drained | {i for i, unit in asked.items() if unit in units}
        missing = asked.keys() - {o.engine_id for o in update.required} - excused
        self.check(not missing, "INV-9", f"{update.update_id} is committed without {missing}")
        self.check(bool(update.required), "INV-9", f"{update.update_id} is committed, and nobody was required")

    # ---- once it is on the disk ----

    def saved(self, coordinator: Watched, record: Record) -> None:
        """What was not synced before a crash was never given."""
        match record:
            case TermGiven():
                highest = self._highest_terms.get(record.model, Term(0))
                self._highest_terms[record.model] = max(record.term, highest)
            case UpdateBegan():
                self._highest_number = max(self._highest_number, record.version.number)
                self.answers[record.request_id] = record.version
                self._began_in[record.update_id] = coordinator.life
                self._phases[record.update_id] = Phase.PREPARING
                self._asked[record.update_id] = {a.engine_id: a.unit for a in record.engines if a.required}
                self.drained[record.update_id] = set()
                if record.restores is not None:
                    self.wrote(record.model, record.version, self.truth[(record.model, record.restores)])
            case UpdateWentGo():
                self._note_phase(record.update_id, Phase.GO)
            case UpdateDecided():
                self._note_phase(record.update_id, record.phase)
            case FrozenServed():
                self.truth[(record.model, FROZEN)] = record.content_digest
            case FloorRaised():
                self._start_anew(record)
            case _:
                pass

    def _note_phase(self, update_id: UpdateId, phase: Phase) -> None:
        before = self._phases.get(update_id, Phase.PREPARING)
        self.check(not before.final, "INV-9", f"{update_id} was {before.value}, and is decided again")
        self.coverage.phases[(before, phase)] += 1
        if phase.final:
            self.drained.pop(update_id, None)
            self._asked.pop(update_id, None)
        self._phases[update_id] = phase

    def _start_anew(self, record: FloorRaised) -> None:
        """What the lost ledger gave above the floor was seen by nobody who is alive."""
        self.ledger_restored = False
        self._highest_number = record.number
        self._highest_terms = dict(record.terms)
        self._highest_coordinator = record.coordinator_term
        self.truth = {k: d for k, d in self.truth.items() if k[1].number <= record.number}
        self._owners = {v: m for v, m in self._owners.items() if v.number <= record.number}
        self.answers.clear()


def _units(outcomes: list[Outcome]) -> list[list[Outcome]]:
    units: dict[str, list[Outcome]] = {}
    for o in outcomes:
        units.setdefault(f"unit {o.unit}" if o.unit else o.engine_id, []).append(o)
    return list(units.values())
