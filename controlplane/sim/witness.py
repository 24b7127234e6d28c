"""Watches a simulated world from outside and raises `Violation` at the first step that breaks the contract.

It knows the truth (which bytes each version is, what each engine really holds, what is on which disk, which
reports were delivered) and compares what is claimed with it. Nothing in the cores is asked whether it is right.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from controlplane.core import engine_events as ee
from controlplane.core import fleet_events as fe
from controlplane.core.engine_state import EngineState, Held, Poisoned, Stage
from controlplane.core.errors import WeightplaneError
from controlplane.core.fleet_records import Record, TermGiven, UpdateBegan, UpdateDecided, UpdateRolled, UpdateWentGo
from controlplane.core.update_transaction import Phase, UpdateTransaction
from controlplane.core.versions import EngineId, ModelName, Term, UpdateId, WeightVersion
from controlplane.sim.coverage import Coverage
from controlplane.sim.kernel import Kernel

if TYPE_CHECKING:
    from controlplane.sim.agent import Life
    from controlplane.sim.coordinator import Coordinator, FleetNews


class Violation(AssertionError):
    """The contract was broken. Not one of the system's errors: nobody may handle it."""

    def __init__(self, invariant: str, text: str) -> None:
        super().__init__(f"{invariant}: {text}")
        self.invariant = invariant


@dataclass(frozen=True, slots=True)
class Delivered:
    """The last report of an engine that the coordinator took."""

    session: int
    state: EngineState
    gate_open: bool
    at: float


class Witness:
    """The contract, seen from outside."""

    def __init__(self, kernel: Kernel, coverage: Coverage, lease_ttl: float) -> None:
        self.coverage = coverage
        self.truth: dict[WeightVersion, bytes] = {}
        self.delivered: dict[EngineId, Delivered] = {}
        self.ledger_restored = False
        """An older copy of the ledger was put back: what it forgot may be given again."""
        self.tokens = 0
        self._kernel = kernel
        self._ttl = lease_ttl
        self._highest_number = 0
        self._highest_terms: dict[ModelName, Term] = {}
        self._highest_coordinator = 0
        self._began_in: dict[UpdateId, int] = {}
        self._phases: dict[UpdateId, str] = {}

    def check(self, good: bool, invariant: str, text: object) -> None:
        if not good:
            raise Violation(invariant, f"at {self._kernel.now:.3f} s: {text}")

    def refused(self, error: WeightplaneError) -> None:
        self.coverage.reasons[error.reason] += 1

    def wrote(self, version: WeightVersion, digest: bytes) -> None:
        """A trainer is about to send these bytes as this version."""
        known = self.truth.setdefault(version, digest)
        self.check(known == digest, "INV-6", f"{version} would be two contents")

    # ---- engines ----

    def engine(self, life: Life, event: ee.Event, before: EngineState, effects: list[ee.Effect]) -> None:
        """An engine agent decided `event`; nothing was carried out yet."""
        after = life.core.state
        self.coverage.engine_events[type(event).__name__] += 1
        self._note_word(life)
        self._check_claim(life, event, before)
        if isinstance(event, ee.InstallEnded):
            self._check_failure(life, event, before)
        for effect in effects:
            if isinstance(effect, ee.StartInstall):
                self._check_start(life, event, effect.update)
            elif isinstance(effect, ee.Accept):
                self._check_accept(life, event, effect)
        self.check(after.incarnation == before.incarnation, "L2", "an incarnation changed its name")

    def _note_word(self, life: Life) -> None:
        word = life.core.state.word(life.core.served)
        if word != life.word:
            self.coverage.words[(life.word, word)] += 1
            life.word = word

    def _check_claim(self, life: Life, event: ee.Event, before: EngineState) -> None:
        after = life.core.state
        applied = after.applied
        if applied is not None and isinstance(after.weights, Held):
            holds = life.engine.content
            self.check(holds == self.truth.get(applied), "INV-1", f"{life} claims {applied}, holds {holds.hex()[:12]}")
            self.check(holds == after.weights.content_digest, "INV-1", f"{life} claims another digest")
        if applied is not None and applied != before.applied:
            by_install = isinstance(event, ee.CanaryPassed)
            restored = isinstance(event, ee.InstallEnded) and not event.touched
            self.check(by_install or restored, "INV-2", f"{type(event).__name__} made {life} claim {applied}")
        if isinstance(event, ee.CanaryPassed) and applied is not None:
            self.check(applied.number >= life.highest, "INV-5", f"{life} applied {applied} after {life.highest}")
            life.highest = applied.number
        if isinstance(event, ee.CanaryPassed):
            life.distrusted = False
        elif isinstance(event, ee.SpansDisagreed):
            life.distrusted = True
        self.check(not (life.distrusted and applied), "INV-11", f"{life} claims {applied} after its spans disagreed")
        if life.core.gate_open:
            self.check(applied is not None and not after.installing, "INV-4", f"{life}: the gate is open on {after}")
            self.check(applied in life.core.served, "INV-10", f"{life}: the gate is open on {applied}")

    def _check_failure(self, life: Life, event: ee.InstallEnded, before: EngineState) -> None:
        after = life.core.state
        if event.touched:
            self.check(isinstance(after.weights, Poisoned), "INV-4", f"{life} was touched and is {after.weights}")
            self.check(not life.core.gate_open, "INV-4", f"{life} is poisoned and its gate is open")
        else:
            kept = after.weights == life.held_before_install
            shut = life.distrusted and isinstance(after.weights, Poisoned)
            self.check(kept or shut, "INV-4", f"{life} lost {life.held_before_install}")

    def _check_start(self, life: Life, event: ee.Event, update: ee.Update) -> None:
        self.check(isinstance(event, ee.CommitArrived), "INV-3", f"{type(event).__name__} began an install on {life}")
        assert isinstance(event, ee.CommitArrived)
        staged = life.staged[update.stream]
        arrived = (staged.chunks, staged.byte_count, staged.digest())
        stated = (event.chunk_count, event.byte_count, event.content_digest)
        self.check(arrived == stated, "INV-3", f"{life}: {stated} was stated, {arrived} came")
        self.check(event.version == update.version, "INV-2", f"a commit of {event.version} began {update.version}")
        seen = life.agent.seen_term
        self.check(update.writer_term >= seen, "INV-7", f"{life} installs of term {update.writer_term}, saw {seen}")
        self.check(life.welcomed, "INV-7", f"{life} installs before a welcome")
        life.held_before_install = life.core.state.weights

    def _check_accept(self, life: Life, event: ee.Event, effect: ee.Accept) -> None:
        assert isinstance(event, ee.Opened)
        self.check(life.welcomed, "INV-7", f"{life} took an update before its welcome")
        self.check(event.writer_term >= life.agent.seen_term, "INV-7", f"{life} took one of term {event.writer_term}")
        self.check(event.version.number >= life.highest, "INV-5", f"{life} took {event.version} after {life.highest}")
        state = life.core.state
        if effect.attached and not state.installing:
            held = life.engine.content == self.truth.get(event.version) and state.applied == event.version
            self.check(held, "INV-6", f"{life} answers {event.version} as done and does not hold it")

    def acted(self, life: Life, event: ee.Event) -> None:
        """What followed from `event` was carried out: terms in it are on the agent's disk now (INV-7)."""
        agent = life.agent
        if isinstance(event, ee.FleetChanged):
            old = agent.seen_coordinator_term
            self.check(event.coordinator_term >= old, "INV-7", f"{life} followed coordinator {event.coordinator_term}")
            agent.seen_coordinator_term = event.coordinator_term
            agent.seen_term = max(agent.seen_term, event.term)
            life.welcomed = True
        elif isinstance(event, ee.Opened):
            agent.seen_term = max(agent.seen_term, event.writer_term)

    def token(self, life: Life, version: WeightVersion, content: bytes) -> None:
        """A token left under `version`; `content` made it."""
        self.tokens += 1
        self.check(content == self.truth.get(version), "INV-11", f"{life} labels a token {version}")

    # ---- the coordinator ----

    def fleet(self, coordinator: Coordinator, event: fe.Event, effects: list[fe.Effect]) -> None:
        """The coordinator decided `event`; nothing was told yet."""
        self.coverage.fleet_events[type(event).__name__] += 1
        core = coordinator.core
        if isinstance(event, fe.EngineConnected):
            report = Delivered(event.session, event.state, event.gate_open, self._kernel.now)
            self.delivered[event.place.engine_id] = report
            self._check_record(coordinator, event.place.engine_id)
        elif isinstance(event, fe.EngineReported):
            self._note_report(coordinator, event)
        elif isinstance(event, fe.Tick):
            for engine_id in core.engines:
                self._check_record(coordinator, engine_id)
        for effect in effects:
            if isinstance(effect, fe.Save):
                self._check_record_to_write(coordinator, effect.record)

    def coordinator_paused(self, seconds: float) -> None:
        """It stood still itself: what engines said meanwhile is still unread, so their silence does not count."""
        self.delivered = {i: replace(d, at=d.at + seconds) for i, d in self.delivered.items()}

    def _note_report(self, coordinator: Coordinator, event: fe.EngineReported) -> None:
        engine_id = event.state.engine_id
        last = self.delivered.get(engine_id)
        record = coordinator.core.engines.get(engine_id)
        if last is None or record is None or record.session != event.session:
            return
        self.check(last.state.incarnation == event.state.incarnation, "INV-8", "an old life's word was taken")
        self.delivered[engine_id] = Delivered(event.session, event.state, event.gate_open, self._kernel.now)
        self._check_record(coordinator, engine_id)

    def _check_record(self, coordinator: Coordinator, engine_id: EngineId) -> None:
        """INV-8: what is known is what that incarnation said, and silence is UNKNOWN."""
        record, last = coordinator.core.engines[engine_id], self.delivered[engine_id]
        self.check(record.state == last.state, "INV-8", f"{engine_id} never said {record.state}")
        if record.session is not None:
            self.check(record.session == last.session, "INV-8", f"{engine_id}'s session is another's")
            silent = self._kernel.now - last.at
            self.check(silent <= self._ttl + 1e-6, "INV-8", f"{engine_id} was silent for {silent} s and is not UNKNOWN")
        self.check_route(coordinator, engine_id)

    def check_route(self, coordinator: Coordinator, engine_id: EngineId) -> None:
        """INV-10, also for a route that is given to a client."""
        core = coordinator.core
        record, last = core.engines[engine_id], self.delivered[engine_id]
        if core.routable(record):
            served = core.model(record.state.model).served
            good = last.gate_open and record.session in coordinator.sessions and last.state.applied in served
            self.check(good, "INV-10", f"{engine_id} is routable: gate {last.gate_open}, {last.state.applied}")

    def _check_record_to_write(self, coordinator: Coordinator, record: Record) -> None:
        match record:
            case TermGiven():
                fresh = record.term > self._highest_terms.get(record.model, Term(0)) or self.ledger_restored
                self.check(fresh, "INV-7", f"term {record.term} is given twice")
            case UpdateBegan():
                self._check_began(record)
            case UpdateWentGo():
                same_life = self._began_in.get(record.update_id) == coordinator.life
                self.check(same_life, "restart", f"{record.update_id} had no go when the coordinator died, and got one")
            case UpdateRolled():
                self._check_rolled(coordinator, coordinator.core.updates[record.update_id], record)
            case UpdateDecided():
                self._check_decision(coordinator, coordinator.core.updates[record.update_id], record)
            case _:
                pass

    def _check_began(self, record: UpdateBegan) -> None:
        fresh = record.version.number > self._highest_number or self.ledger_restored
        self.check(fresh, "versions", f"number {record.version.number} is given after {self._highest_number}")
        current = self._highest_terms.get(record.model, Term(0))
        self.check(record.version.term == current, "INV-7", f"an update of term {record.version.term}, not {current}")

    def saved(self, coordinator: Coordinator, record: Record) -> None:
        """It is on the disk now. What was not synced before a crash was never given."""
        match record:
            case TermGiven():
                highest = self._highest_terms.get(record.model, Term(0))
                self._highest_terms[record.model] = max(record.term, highest)
            case UpdateBegan():
                self._highest_number = max(self._highest_number, record.version.number)
                self._began_in[record.update_id] = coordinator.life
                self._phases[record.update_id] = "preparing"
            case UpdateWentGo():
                self._note_phase(record.update_id, "go")
            case UpdateDecided():
                self._note_phase(record.update_id, record.phase.value)
            case _:
                pass

    def _note_phase(self, update_id: UpdateId, phase: str) -> None:
        self.coverage.phases[(self._phases.get(update_id, "preparing"), phase)] += 1
        self._phases[update_id] = phase

    def _check_decision(self, coordinator: Coordinator, update: UpdateTransaction, record: UpdateDecided) -> None:
        """INV-9: by the reports of incarnations alive now, at least one; unless its version is served already."""
        rolled = record.update_id in coordinator.ledger.kept.rolled
        if record.phase is Phase.FAILED:
            self.check(not rolled, "INV-9", f"{record.update_id} was served already, and is given up")
            return
        self.check(update.version in record.served, "INV-9", f"{record.update_id} serves {record.served}")
        alive = rolled or self._has_holder(coordinator, update)
        self.check(alive, "INV-9", f"{record.update_id} is {record.phase.value}, and no live engine applied it")
        if record.phase is Phase.COMMITTED:
            said = sum(o.stage is Stage.APPLIED for o in update.required)
            needed = coordinator.world.policy.needed(len(update.required))
            self.check(said >= needed, "INV-9", f"{record.update_id} is committed by {said} of {needed}")

    def _check_rolled(self, coordinator: Coordinator, update: UpdateTransaction, record: UpdateRolled) -> None:
        before = coordinator.ledger.kept.served.get(record.model, ())
        only = set(record.served) <= {*before[-1:], update.version} and update.version in record.served
        self.check(only, "INV-9", f"{record.update_id} rolls from {before} to {record.served}")
        self.check(
            self._has_holder(coordinator, update), "INV-9", f"{record.update_id} rolls, and no live engine applied it"
        )

    def _has_holder(self, coordinator: Coordinator, update: UpdateTransaction) -> bool:
        return any(self._holds_it(coordinator, o.engine_id, update) for o in update.outcomes.values())

    def _holds_it(self, coordinator: Coordinator, engine_id: EngineId, update: UpdateTransaction) -> bool:
        """By its last word, and it is not known to be gone."""
        last, record = self.delivered.get(engine_id), coordinator.core.engines.get(engine_id)
        if last is None or record is None or last.state.incarnation != update.outcomes[engine_id].incarnation:
            return False
        alive = record.session is not None or self._kernel.now - last.at <= self._ttl + 1e-6
        return alive and last.state.applied == update.version

    # ---- what the coordinator tells (INV-9: it is on the disk before) ----

    def coordinator_began(self, term: Term) -> None:
        self.check(term > self._highest_coordinator or self.ledger_restored, "INV-7", f"coordinator term {term} again")
        self._highest_coordinator = max(term, self._highest_coordinator)

    def told_state(self, coordinator: Coordinator, news: FleetNews) -> None:
        kept = coordinator.ledger.kept
        for model in news.models:
            on_disk = kept.served.get(model.name, ())
            self.check(set(model.served) == set(on_disk), "INV-9", f"{model.served} is told, {on_disk} is on disk")
            self.check(model.term == kept.terms.get(model.name, 0), "INV-9", f"term {model.term} is told, not written")

    def told_term(self, coordinator: Coordinator, model: ModelName, term: Term) -> None:
        self.check(coordinator.ledger.kept.terms.get(model) == term, "INV-9", f"term {term} is told and not on disk")

    def told_plan(self, coordinator: Coordinator, update_id: UpdateId) -> None:
        self.check(update_id in coordinator.ledger.kept.began, "INV-9", f"{update_id} is told and not on disk")

    def told_phase(self, coordinator: Coordinator, update_id: UpdateId, phase: Phase) -> None:
        kept = coordinator.ledger.kept
        if phase is Phase.GO:
            self.check(update_id in kept.went_go, "INV-9", f"go of {update_id} is told and not on disk")
        elif phase.final:
            decided = kept.decided.get(update_id)
            good = decided is not None and decided.phase is phase
            self.check(good, "INV-9", f"{phase.value} of {update_id} is told and not on disk")
