"""Cores that each break one rule: the simulator's witness names it, by seeds or in the scenario made for it."""

from __future__ import annotations

import pytest

from controlplane.core import fleet_begins, fleet_engines, fleet_updates
from controlplane.core.engine_core import EngineCore
from controlplane.core.fleet import FleetCore
from controlplane.core.update_transaction import UpdateTransaction
from controlplane.sim.runner import run_scenario, run_seed
from controlplane.sim.settings import SimSettings
from tests.sim.planted_engines import (
    ACutStreamCostsNothing,
    AnswersDone,
    ClaimsAfterADeepSleep,
    ClaimsAtTheCommit,
    ClaimsDuringTheInstall,
    FollowsOldCoordinators,
    ForgetsPoison,
    ForgetsTerms,
    FrozenTakesUpdates,
    GoesBack,
    HeedsDeadLives,
    HeedsNoDoubt,
    IgnoresHolds,
    IsAwakeThoughASleepFollowed,
    LeavesAStreamToAFencedWriter,
    NeedsNoWelcome,
    NeverCutsAStream,
    ObeysOldCoordinators,
    ResumesAfterAFailure,
    SleepsNoMore,
    StreamsItselfToItsEnd,
    TakesAnyModel,
    TakesUpdatesWhileAsleep,
    TakesUpdatesWhileDraining,
    TheEndCommits,
    TheEndOfAStreamIsItsCommit,
    WakesForAnybody,
)
from tests.sim.planted_fleets import (
    AcceptsALedgerBelowWhatAgentsSaw,
    AnswersARequestTwice,
    CarriesOntoLentDevices,
    GivesNumbersTwice,
    GivesTermsTwice,
    KeepsAnyCheckpoint,
    NeverCarries,
    NeverDecides,
    PlansForWhoStays,
    RetiresWhatIsStayedAt,
    RollsBackUnderAnOldNumber,
    RoutesUnitsApart,
    RoutesWhatIsShut,
    SavesNoDecision,
    SavesNoGo,
    ServesUnitsApart,
    TellsWhoStaysWhatTheFleetServes,
    TrustsSilence,
)

SEEDS = range(60)
EVENTS = 1200


def planted(core: type[EngineCore] | type[FleetCore]) -> SimSettings:
    return SimSettings(engine_core=core) if issubclass(core, EngineCore) else SimSettings(fleet_core=core)


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
