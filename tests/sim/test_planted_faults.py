"""Cores that each break one rule: the simulator's witness names it, by seeds or in the scenario made for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core import fleet_begins, fleet_engines, fleet_updates
from controlplane.core import fleet_events as fe
from controlplane.core.engine_core import EngineCore
from controlplane.core.engine_state import Held, HoldKind, Poisoned, Residency
from controlplane.core.fleet import FleetCore
from controlplane.core.fleet_records import EngineKept, EngineRecord, UpdateDecided, UpdateWentGo
from controlplane.core.update_transaction import UpdateTransaction
from controlplane.core.versions import NO_TERM, ModelName, Term, WeightVersion
from controlplane.sim.runner import run_scenario, run_seed
from controlplane.sim.settings import SimSettings

SEEDS = range(60)
EVENTS = 1200


def planted(core: type[EngineCore] | type[FleetCore]) -> SimSettings:
    return SimSettings(engine_core=core) if issubclass(core, EngineCore) else SimSettings(fleet_core=core)


class ClaimsDuringTheInstall(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        return [] if isinstance(event, ee.Quiesced) else super().handle(event, now)


class ClaimsAtTheCommit(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        effects = super().handle(event, now)
        if isinstance(event, ee.CommitArrived):
            self.state = replace(self.state, weights=Held(event.version, event.content_digest))
        return effects


class TheEndCommits(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        update = self.update
        if isinstance(event, ee.StreamEnded) and update is not None and update.verified and not self.state.installing:
            return [fx.StartInstall(event.stream, update)]
        return super().handle(event, now)


class ResumesAfterAFailure(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        if isinstance(event, ee.InstallEnded):
            event = replace(event, touched=False)
        return super().handle(event, now)


class ForgetsPoison(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        before = self.state
        effects = super().handle(event, now)
        if isinstance(self.state.weights, Poisoned) and isinstance(event, ee.SpansDisagreed):
            self.state = before
        return effects


class GoesBack(EngineCore):
    def _check_version(self, event: ee.Opened) -> None:
        pass


class AnswersDone(EngineCore):
    def _is_done_or_under_way(self, event: ee.Opened) -> bool:
        progress = self.state.progress
        return progress is not None and (progress.update_id, progress.version) == (event.update_id, event.version)


class ForgetsTerms(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        self.term = Term(0)
        return super().handle(event, now)


class NeedsNoWelcome(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        self.welcomed = True
        return super().handle(event, now)


class FollowsOldCoordinators(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        if isinstance(event, ee.FleetChanged):
            self.coordinator_term = Term(0)
        return super().handle(event, now)


class IgnoresHolds(EngineCore):
    @property
    def gate_open(self) -> bool:
        return isinstance(self.state.weights, Held) and self.state.weights.version in self.served


class TrustsSilence(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fe.Effect]:
        return [] if isinstance(event, fe.Tick) else super().handle(event, now)


class RoutesWhatIsShut(FleetCore):
    def routable(self, record: EngineRecord) -> bool:
        return record.state.applied in self.model(record.state.model).served


class SavesNoDecision(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fe.Effect]:
        effects = super().handle(event, now)
        return [x for x in effects if not (isinstance(x, fe.Save) and isinstance(x.record, UpdateDecided))]


class SavesNoGo(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fe.Effect]:
        effects = super().handle(event, now)
        return [x for x in effects if not (isinstance(x, fe.Save) and isinstance(x.record, UpdateWentGo))]


class GivesNumbersTwice(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fe.Effect]:
        if isinstance(event, fe.UpdateRequested):
            self.next_number = 1
        return super().handle(event, now)


class GivesTermsTwice(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fe.Effect]:
        if isinstance(event, fe.TrainerConnected):
            self.model(event.model).term = Term(0)
        return super().handle(event, now)


class NeverDecides(FleetCore):
    def open_update(self, model: ModelName) -> UpdateTransaction | None:
        return None


class ClaimsAfterADeepSleep(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        weights = self.state.weights
        effects = super().handle(event, now)
        if isinstance(event, ee.SleepRequested):
            self.state = replace(self.state, weights=weights)
        return effects


class TakesUpdatesWhileAsleep(EngineCore):
    def _check_able(self, event: ee.Opened) -> None:
        state = self.state
        self.state = replace(state, residency=Residency.AWAKE)
        try:
            super()._check_able(event)
        finally:
            self.state = state


class TakesUpdatesWhileDraining(EngineCore):
    def _check_able(self, event: ee.Opened) -> None:
        state = self.state
        self.state = replace(state, holds=frozenset(h for h in state.holds if h.kind is not HoldKind.DRAINING))
        try:
            super()._check_able(event)
        finally:
            self.state = state


class FrozenTakesUpdates(EngineCore):
    def _check_able(self, event: ee.Opened) -> None:
        pass


class WakesForAnybody(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        if isinstance(event, ee.WakeRequested):
            holds = frozenset(h for h in self.state.holds if h.kind is not HoldKind.ASLEEP)
            self.state = replace(self.state, holds=holds)
        return super().handle(event, now)


class IsAwakeThoughASleepFollowed(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        self._power._outdated = 0
        return super().handle(event, now)


class HeedsDeadLives(EngineCore):
    def heed(self, event: ee.SleepRequested | ee.WakeRequested) -> None:
        pass


class SleepsNoMore(EngineCore):
    """The devices stay taken, whatever it says."""

    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        return [x for x in super().handle(event, now) if not isinstance(x, fx.StartSleep)]


class ObeysOldCoordinators(EngineCore):
    def _fence(self, writer_term: Term, *, by_coordinator: bool) -> e.StaleTerm | None:
        return None if by_coordinator else super()._fence(writer_term, by_coordinator=by_coordinator)


class TakesAnyModel(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        if isinstance(event, ee.Opened):
            event = replace(event, model=self.state.model)
        return super().handle(event, now)


class CarriesOntoLentDevices(FleetCore):
    def lent(self, record: EngineRecord) -> bool:
        return False


class ServesUnitsApart(FleetCore):
    def served_for(self, record: EngineRecord) -> tuple[WeightVersion, ...]:
        return self.model(record.state.model).served


class RoutesUnitsApart(FleetCore):
    def routable(self, record: EngineRecord) -> bool:
        return self._open(record) and record.state.applied in self.model(record.state.model).served


class RollsBackUnderAnOldNumber(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fe.Effect]:
        if isinstance(event, fe.RollbackRequested) and event.number in self.model(event.model).checkpoints:
            self.next_number = event.number
        return super().handle(event, now)


class AnswersARequestTwice(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fe.Effect]:
        if isinstance(event, fe.UpdateRequested):
            self.requests.clear()
        return super().handle(event, now)


class TheEndOfAStreamIsItsCommit(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        update = self.update
        over = isinstance(event, ee.StreamEnded) and update is not None and update.stream == event.stream
        if over and update is not None and update.streaming and update.verified and update.in_stream:
            update.committed = True
            return [fx.FinishStreaming(update.stream, update)]
        return super().handle(event, now)


class StreamsItselfToItsEnd(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        effects = super().handle(event, now)
        update = self.update
        if isinstance(event, ee.BytesVerified) and update is not None and update.streaming:
            update.committed = True
            effects.append(fx.FinishStreaming(update.stream, update))
        return effects


class LeavesAStreamToAFencedWriter(EngineCore):
    def _see_terms(self, term: Term = NO_TERM, coordinator_term: Term = NO_TERM) -> list[fx.Effect]:
        update = self.update
        if update is None or not (update.streaming and self.state.installing):
            return super()._see_terms(term, coordinator_term)
        self.term, self.coordinator_term = max(self.term, term), max(self.coordinator_term, coordinator_term)
        return [self._remember()]

    def _fence(self, writer_term: Term, *, by_coordinator: bool) -> e.StaleTerm | None:
        streams = self.update is not None and self.update.streaming and self.state.installing
        return None if streams else super()._fence(writer_term, by_coordinator=by_coordinator)


class ACutStreamCostsNothing(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        update = self.update
        if isinstance(event, ee.InstallEnded) and update is not None and update.cut:
            event = replace(event, touched=False)
        return super().handle(event, now)


class NeverCutsAStream(EngineCore):
    """What ends without a commit frame waits for one for ever."""

    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        return [x for x in super().handle(event, now) if not isinstance(x, fx.CutStreaming)]


class HeedsNoDoubt(EngineCore):
    def handle(self, event: ee.Event, now: float) -> list[fx.Effect]:
        return [] if isinstance(event, ee.Doubted) else super().handle(event, now)


class PlansForWhoStays(FleetCore):
    def kept_at(self, record: EngineRecord) -> EngineKept | None:
        return None


class TellsWhoStaysWhatTheFleetServes(FleetCore):
    def served_to(self, session: int, model: ModelName) -> tuple[WeightVersion, ...]:
        record = self.of_session(session)
        stays = record is not None and self.kept_at(record) is not None
        return self.model(model).served if stays else super().served_to(session, model)


class RetiresWhatIsStayedAt(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fe.Effect]:
        if not isinstance(event, fe.CheckpointRetired):
            return super().handle(event, now)
        kept, self.kept = self.kept, {}
        try:
            return super().handle(event, now)
        finally:
            self.kept = kept


class KeepsAnyCheckpoint(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fe.Effect]:
        if isinstance(event, fe.CheckpointPublished):
            version = event.checkpoint.version
            self.model(event.checkpoint.model).digests[version] = event.checkpoint.content_digest
        return super().handle(event, now)


PLANTED: list[tuple[type[EngineCore] | type[FleetCore], str]] = [
    (ClaimsDuringTheInstall, "INV-1"),
    (ClaimsAtTheCommit, "INV-1"),
    (TheEndCommits, "INV-3"),
    (ResumesAfterAFailure, "INV-1"),
    (ForgetsPoison, "INV-11"),
    (AnswersDone, "INV-6"),
    (ForgetsTerms, "INV-7"),
    (NeedsNoWelcome, "INV-7"),
    (IgnoresHolds, "INV-4"),
    (TrustsSilence, "INV-8"),
    (RoutesWhatIsShut, "INV-10"),
    (SavesNoDecision, "INV-9"),
    (SavesNoGo, "INV-9"),
    (GivesNumbersTwice, "versions"),
    (GivesTermsTwice, "INV-7"),
    (NeverDecides, "liveness"),
    (ClaimsAfterADeepSleep, "INV-1"),
    (TakesUpdatesWhileAsleep, "sleep"),
    (TakesUpdatesWhileDraining, "drain"),
    (FrozenTakesUpdates, "frozen"),
    (WakesForAnybody, "devices"),
    (SleepsNoMore, "sleep"),
    (CarriesOntoLentDevices, "devices"),
    (ServesUnitsApart, "units"),
    (RoutesUnitsApart, "units"),
    (StreamsItselfToItsEnd, "INV-3"),
    (NeverCutsAStream, "liveness"),
    (PlansForWhoStays, "keeps"),
    (TellsWhoStaysWhatTheFleetServes, "INV-9"),
]


@pytest.mark.parametrize(("core", "invariant"), PLANTED, ids=[c.__name__ for c, _ in PLANTED])
def test_a_planted_fault_is_caught(core: type[EngineCore] | type[FleetCore], invariant: str) -> None:
    found = set()
    for seed in SEEDS:
        _, violation = run_seed(seed, EVENTS, planted(core))
        found.add(violation.invariant if violation else "")
        if invariant in found:
            return
    pytest.fail(f"{invariant} was not named: {found}")


class NeverCarries(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fe.Effect]:
        return [x for x in super().handle(event, now) if not isinstance(x, fe.StartCarry)]


class AcceptsALedgerBelowWhatAgentsSaw(FleetCore):
    def handle(self, event: fe.Event, now: float) -> list[fe.Effect]:
        if isinstance(event, fe.LedgerAccepted):
            self.seen.number = 0
        return super().handle(event, now)


IN_SCENARIOS: list[tuple[str, type[EngineCore] | type[FleetCore], str]] = [
    ("a_wake_a_sleep_and_a_wake_in_one_moment", IsAwakeThoughASleepFollowed, "sleep"),
    ("a_late_sleep_of_a_trainers_dead_life_moves_no_engine", HeedsDeadLives, "INV-7"),
    ("every_wrong_call_is_refused", KeepsAnyCheckpoint, "INV-6"),
    ("a_checkpoint_heals_a_fleet_whose_trainer_is_gone", NeverCarries, "liveness"),
    ("the_ledger_is_restored_from_an_older_copy_while_agents_restart_too", AcceptsALedgerBelowWhatAgentsSaw, "INV-7"),
    ("nobody_carries_to_devices_that_a_trainer_holds", CarriesOntoLentDevices, "devices"),
    ("a_rollback_goes_around_devices_that_a_trainer_holds", CarriesOntoLentDevices, "devices"),
    ("every_lie_to_an_engine_meets_its_reason", GoesBack, "INV-5"),
    ("every_lie_to_an_engine_meets_its_reason", ObeysOldCoordinators, "INV-7"),
    ("every_lie_to_an_engine_meets_its_reason", TakesAnyModel, "models"),
    ("one_of_three_equal_engines_says_something_else", HeedsNoDoubt, "doubts"),
    ("a_stream_ends_between_its_last_chunk_and_its_commit", TheEndOfAStreamIsItsCommit, "INV-3"),
    ("a_stream_breaks_in_the_middle_of_its_install", ACutStreamCostsNothing, "INV-1"),
    ("a_writer_that_was_fenced_goes_on_sending", LeavesAStreamToAFencedWriter, "INV-7"),
    ("a_checkpoint_that_an_engine_stays_at_is_not_retired", RetiresWhatIsStayedAt, "keeps"),
    ("the_next_life_of_an_engine_that_stays_is_brought_to_its_version", NeverCarries, "liveness"),
    ("a_rollback_is_a_new_number", RollsBackUnderAnOldNumber, "versions"),
    ("a_repeated_begin_after_a_restart_gives_no_second_number", AnswersARequestTwice, "requests"),
]


@pytest.mark.parametrize(("name", "core", "invariant"), IN_SCENARIOS, ids=[c.__name__ for _, c, _ in IN_SCENARIOS])
def test_a_planted_fault_is_caught_by_a_scenario(
    name: str, core: type[EngineCore] | type[FleetCore], invariant: str
) -> None:
    _, violation = run_scenario(name, 0, planted(core))
    assert violation is not None
    assert violation.invariant == invariant, str(violation)


def test_a_joiner_that_nobody_waits_for_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_begins, "MISSES_BEFORE_AWAITED", 10**6)
    _, violation = run_scenario("a_joiner_slower_than_the_steps_is_waited_for", 0, SimSettings())
    assert violation is not None
    assert violation.invariant == "liveness"


def test_a_decision_that_trusts_whom_equal_engines_contradict_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (fleet_engines, fleet_updates):
        monkeypatch.setattr(module, "judge_all", lambda book, model, now: [])
    _, violation = run_scenario("one_of_three_equal_engines_says_something_else", 0, SimSettings())
    assert violation is not None
    assert violation.invariant == "doubts", str(violation)


def test_a_commit_without_an_engine_that_did_not_drain_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(UpdateTransaction, "_drains", lambda self, state: state.progress is not None)
    _, violation = run_scenario("one_of_n_installs_fails_after_go_under_all", 0, SimSettings())
    assert violation is not None
    assert violation.invariant == "INV-9", str(violation)


def test_a_planted_old_coordinator_is_followed_only_by_the_planted_core() -> None:
    name = "an_old_coordinators_call_arrives_after_the_new_ones"
    _, violation = run_scenario(name, 0, SimSettings(engine_core=FollowsOldCoordinators))
    assert violation is not None
