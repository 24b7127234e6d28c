"""One suite for every ledger: what is saved is there after a reopen, and numbers and terms only grow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from controlplane.core.engine_state import Stage
from controlplane.core.errors import LedgerError
from controlplane.core.fleet_records import (
    REQUEST_ID_SECONDS,
    CheckpointGone,
    CheckpointKept,
    EngineAsked,
    EngineForgotten,
    EngineKept,
    EngineKnown,
    EngineReleased,
    FloorRaised,
    FrozenServed,
    Record,
    Recovered,
    RequestKnown,
    TermGiven,
    UpdateBegan,
    UpdateDecided,
    UpdateRolled,
    UpdateWentGo,
)
from controlplane.core.update_outcomes import Outcome
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import (
    FROZEN,
    EngineId,
    Incarnation,
    ModelName,
    RunId,
    Term,
    TrainerId,
    UpdateId,
    WeightVersion,
)
from controlplane.ledger import Ledger, MemoryLedger, SqliteLedger

RUN = RunId("run")
POLICY = ModelName("policy")
TEACHER = ModelName("teacher")
LAYOUT = b"L" * 32
BEGUN_AT = 1_800_000_000.0


class Clock:
    """Unix seconds, moved by hand."""

    def __init__(self) -> None:
        self.now = BEGUN_AT

    def __call__(self) -> float:
        return self.now


class Disk:
    """A ledger that outlives its coordinators: `restart` gives what the next one finds."""

    def __init__(self, make: Callable[[], Ledger], clock: Clock) -> None:
        self.clock = clock
        self._make = make
        self._ledger: Ledger | None = None

    def restart(self, *records: Record, run_id: RunId = RUN) -> Recovered:
        """Begin another life, after these were saved in the present one (or in one of their own)."""
        if records:
            self.save(*records)
        self.close()
        self._ledger = self._make()
        return self._ledger.open(run_id)

    def save(self, *records: Record) -> None:
        if self._ledger is None:
            self.restart()
        assert self._ledger is not None
        for record in records:
            self._ledger.save(record)

    def close(self) -> None:
        if self._ledger is not None:
            self._ledger.close()
            self._ledger = None


@pytest.fixture(params=["memory", "sqlite"])
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Disk]:
    clock = Clock()
    memory = MemoryLedger(clock)
    disk = Disk(lambda: memory if request.param == "memory" else SqliteLedger(tmp_path / "ledger.sqlite", clock), clock)
    yield disk
    disk.close()


def version(number: int, term: int = 3) -> WeightVersion:
    return WeightVersion(number, Term(term))


def digest(number: int) -> bytes:
    return bytes([number]) * 32


def began(number: int, model: ModelName = POLICY, restores: WeightVersion | None = None) -> UpdateBegan:
    engines = (
        EngineAsked(EngineId("e1"), Incarnation("i1"), True, "rollout", "pd0"),
        EngineAsked(EngineId("e0"), Incarnation("i0"), False),
    )
    return UpdateBegan(
        UpdateId(f"u{number}"), f"r{number}", model, version(number), 7, engines, LAYOUT, 1 << 40, restores
    )


def rolled(number: int, served: tuple[int, ...], ordinal: int, content: bytes = b"") -> UpdateRolled:
    return UpdateRolled(UpdateId(f"u{number}"), POLICY, tuple(map(version, served)), ordinal, content)


def decided(
    number: int,
    served: tuple[int, ...],
    ordinal: int,
    *,
    phase: Phase = Phase.COMMITTED,
    content: bytes = b"",
    outcomes: tuple[Outcome, ...] = (),
) -> UpdateDecided:
    versions = tuple(map(version, served))
    return UpdateDecided(UpdateId(f"u{number}"), POLICY, phase, "", versions, ordinal, content, outcomes)


def lease(term: int, model: ModelName = POLICY) -> TermGiven:
    return TermGiven(model, Term(term), TrainerId("t"), Incarnation(f"i{term}"))


def floor(number: int, coordinator_term: int, *terms: tuple[ModelName, Term]) -> FloorRaised:
    return FloorRaised(number, Term(coordinator_term), terms, "ada")


def checkpoint(number: int, model: ModelName = POLICY) -> CheckpointKept:
    return CheckpointKept(model, version(number), f"{model}/{number}", LAYOUT, digest(number), 290, 4, 1 << 41)


# ---- terms and engines ----


def test_each_opening_is_a_higher_coordinator_term(disk: Disk) -> None:
    assert [disk.restart().coordinator_term for _ in range(3)] == [1, 2, 3]


def test_a_lease_and_its_holder_survive(disk: Disk) -> None:
    again = disk.restart(lease(1), lease(2))
    assert again.leases == (lease(2),)
    assert again.models[POLICY].term == 2


def test_inv7_a_lower_term_than_one_that_was_given_is_refused(disk: Disk) -> None:
    disk.save(lease(2))
    with pytest.raises(LedgerError, match="term 1 of policy was given before"):
        disk.save(lease(1))
    assert disk.restart(lease(1, TEACHER)).leases == (lease(2), lease(1, TEACHER))


def test_an_engine_is_known_until_it_says_goodbye(disk: Disk) -> None:
    e0, e1 = EngineId("e0"), EngineId("e1")
    again = disk.restart(EngineKnown(e0, POLICY), EngineKnown(e1, POLICY), EngineForgotten(e0))
    assert again.engines == (EngineKnown(e1, POLICY),)


def test_an_engine_stays_at_its_version_over_its_goodbye_until_it_is_released(disk: Disk) -> None:
    e0, e1 = (EngineKept(EngineId(name), POLICY, version(4), digest(4)) for name in ("e0", "e1"))
    later = EngineKept(EngineId("e0"), POLICY, version(5))
    found = disk.restart(e1, e0, EngineForgotten(EngineId("e0")))
    assert found.kept == (e0, e1)
    assert disk.restart(later).kept == (later, e1)
    assert disk.restart(EngineReleased(EngineId("e0")), EngineReleased(EngineId("e9"))).kept == (e1,)


def test_l7_another_runs_ledger_is_refused(disk: Disk) -> None:
    disk.restart()
    with pytest.raises(LedgerError, match="belongs to run run, not other"):
        disk.restart(run_id=RunId("other"))


# ---- updates ----


def test_v8_a_number_is_used_up_though_its_update_never_commits(disk: Disk) -> None:
    assert disk.restart(began(41), decided(41, (), 0, phase=Phase.FAILED)).next_number == 42


@pytest.mark.parametrize("number", [4, 5])
def test_a_number_is_never_given_twice_nor_out_of_turn(disk: Disk, number: int) -> None:
    disk.save(began(5))
    with pytest.raises(LedgerError, match=f"number {number} was given before"):
        disk.save(UpdateBegan(UpdateId("other"), "r", POLICY, version(number), None, ()))
    assert disk.restart().open_updates == ((began(5), False),)


def test_an_update_without_a_decision_is_found_as_it_began_with_its_go(disk: Disk) -> None:
    first = disk.restart(began(1), decided(1, (1,), 1), began(2, restores=version(1)))
    assert first.open_updates == ((began(2, restores=version(1)), False),)
    assert disk.restart(UpdateWentGo(UpdateId("u2"))).open_updates == ((began(2, restores=version(1)), True),)


def test_what_is_served_and_its_ordinal_survive(disk: Disk) -> None:
    model = disk.restart(began(1), decided(1, (1,), 1), began(2), decided(2, (2,), 2)).models[POLICY]
    assert (model.served, model.ordinal) == ((version(2),), 2)


def test_a_rolling_update_is_found_with_both_versions_served(disk: Disk) -> None:
    again = disk.restart(
        began(1), decided(1, (1,), 1), began(2), UpdateWentGo(UpdateId("u2")), rolled(2, (1, 2), ordinal=2)
    )
    assert (again.models[POLICY].served, again.models[POLICY].ordinal) == ((version(1), version(2)), 2)
    assert again.rolled == {UpdateId("u2")}
    assert again.open_updates == ((began(2), True),)


def test_the_fate_of_an_update_that_never_began_is_refused(disk: Disk) -> None:
    for record in (UpdateWentGo(UpdateId("u1")), rolled(1, (1,), 1), decided(1, (1,), 1)):
        with pytest.raises(LedgerError, match="update u1 never began"):
            disk.save(record)
    assert disk.restart().models == {}


def test_inv9_what_is_decided_is_not_opened_again(disk: Disk) -> None:
    disk.save(began(1), decided(1, (1,), 1))
    for late in (UpdateWentGo(UpdateId("u1")), rolled(1, (1,), 2), decided(1, (), 2)):
        with pytest.raises(LedgerError, match="is decided"):
            disk.save(late)
    again = disk.restart()
    assert again.open_updates == ()
    assert (again.models[POLICY].served, again.models[POLICY].ordinal) == ((version(1),), 1)


def test_a_decision_with_the_outcomes_of_engines_that_were_not_asked_is_written(disk: Disk) -> None:
    outcomes = (
        Outcome(EngineId("e1"), Incarnation("i1"), True, Stage.APPLIED, unit="pd0", content_digest=digest(1)),
        Outcome(EngineId("late"), Incarnation("i9"), False, lost=True, error_reason="PEER_LOST", awaited=True),
    )
    again = disk.restart(began(1), decided(1, (1,), 1, content=digest(1), outcomes=outcomes))
    assert again.open_updates == ()
    assert again.models[POLICY].digests == {version(1): digest(1)}


def test_what_was_opened_is_the_coordinators_own_to_change(disk: Disk) -> None:
    mine = disk.restart(began(1), decided(1, (1,), 1, content=digest(1)), checkpoint(1)).models[POLICY]
    mine.served, mine.ordinal = (version(9),), 9
    mine.digests.clear()
    mine.checkpoints.clear()
    theirs = disk.restart().models[POLICY]
    assert (theirs.served, theirs.ordinal) == ((version(1),), 1)
    assert (theirs.digests, theirs.checkpoints) == ({version(1): digest(1)}, {1: checkpoint(1)})


# ---- contents ----


def test_a_commits_digest_is_that_of_what_is_served(disk: Disk) -> None:
    commits = (began(1), decided(1, (1,), 1, content=digest(1)), began(2), decided(2, (2,), 2, content=digest(2)))
    assert disk.restart(*commits).models[POLICY].digests == {version(2): digest(2)}


def test_a_failed_updates_digest_leaves_what_is_served_as_it_is(disk: Disk) -> None:
    failed = decided(2, (1,), 1, phase=Phase.FAILED, content=digest(2))
    again = disk.restart(began(1), decided(1, (1,), 1, content=digest(1)), began(2), failed)
    assert again.models[POLICY].digests == {version(1): digest(1)}


def test_while_rolling_both_digests_are_known_and_later_words_without_one_forget_none(disk: Disk) -> None:
    disk.save(began(1), decided(1, (1,), 1, content=digest(1)), began(2))
    both = {version(1): digest(1), version(2): digest(2)}
    assert disk.restart(rolled(2, (1, 2), 2, digest(2))).models[POLICY].digests == both
    stuck = disk.restart(decided(2, (1, 2), 2, phase=Phase.DEGRADED))  # nobody holds the new one any more
    assert stuck.models[POLICY].digests == both


def test_a_commit_without_a_digest_is_served_without_one(disk: Disk) -> None:
    model = disk.restart(began(1), decided(1, (1,), 1)).models[POLICY]
    assert (model.served, model.digests) == ((version(1),), {})


def test_a_frozen_model_is_served_as_number_0_with_its_checkpoints_digest(disk: Disk) -> None:
    again = disk.restart(FrozenServed(TEACHER, digest(9)))
    model = again.models[TEACHER]
    assert model.frozen
    assert (model.served, model.digests, model.ordinal) == ((FROZEN,), {FROZEN: digest(9)}, 0)
    assert again.next_number == 1


def test_a_checkpoint_is_known_until_it_goes(disk: Disk) -> None:
    again = disk.restart(checkpoint(1), checkpoint(2), checkpoint(3, TEACHER))
    assert again.models[POLICY].checkpoints == {1: checkpoint(1), 2: checkpoint(2)}
    assert again.models[TEACHER].checkpoints == {3: checkpoint(3, TEACHER)}
    gone = disk.restart(CheckpointGone(POLICY, 1), CheckpointGone(POLICY, 3))
    assert gone.models[POLICY].checkpoints == {2: checkpoint(2)}
    assert gone.models[TEACHER].checkpoints == {3: checkpoint(3, TEACHER)}


# ---- requests ----


def known(number: int, age_seconds: float) -> RequestKnown:
    return RequestKnown(f"r{number}", UpdateId(f"u{number}"), POLICY, version(number), LAYOUT, age_seconds)


def test_an_answered_request_is_remembered_over_restarts_with_its_age_decided_or_not(disk: Disk) -> None:
    disk.save(began(1), decided(1, (1,), 1))
    disk.clock.now += 100.0
    assert disk.restart(began(2)).requests == (known(1, 100.0), known(2, 0.0))
    disk.clock.now += 50.0
    assert disk.restart().requests == (known(1, 150.0), known(2, 50.0))


def test_a_request_is_forgotten_after_its_time_and_its_number_is_not(disk: Disk) -> None:
    disk.save(began(1), decided(1, (1,), 1))
    disk.clock.now += REQUEST_ID_SECONDS - 1.0
    assert disk.restart().requests == (known(1, REQUEST_ID_SECONDS - 1.0),)
    disk.clock.now += 1.0
    again = disk.restart()
    assert (again.requests, again.next_number) == ((), 2)


def test_an_open_update_is_found_however_old_its_request_is(disk: Disk) -> None:
    disk.save(began(1))
    disk.clock.now += 10 * REQUEST_ID_SECONDS
    again = disk.restart()
    assert (again.requests, again.open_updates) == ((), ((began(1), False),))


def test_a_clock_that_was_put_back_forgets_no_request(disk: Disk) -> None:
    disk.save(began(1))
    disk.clock.now -= 3600.0
    assert disk.restart().requests == (known(1, 0.0),)


# ---- floors ----


def test_nothing_up_to_an_accepted_floor_is_given_again(disk: Disk) -> None:
    disk.save(began(1), lease(3))
    again = disk.restart(floor(40, 17, (POLICY, Term(5)), (TEACHER, Term(2))))
    assert again.next_number == 41
    assert again.coordinator_term == 18
    assert {name: model.term for name, model in again.models.items()} == {POLICY: 5, TEACHER: 2}
    for record in (began(40), lease(5), lease(2, TEACHER)):
        with pytest.raises(LedgerError, match="given before"):
            disk.save(record)
    third = disk.restart(began(41), lease(6), lease(3, TEACHER))
    assert (third.next_number, third.coordinator_term) == (42, 19)
    assert {name: model.term for name, model in third.models.items()} == {POLICY: 6, TEACHER: 3}


def test_a_floor_below_what_is_known_lowers_nothing(disk: Disk) -> None:
    disk.restart()
    disk.save(began(9), lease(3), floor(40, 17, (POLICY, Term(2))))
    again = disk.restart(floor(5, 1, (POLICY, Term(1))))
    assert (again.next_number, again.coordinator_term, again.models[POLICY].term) == (41, 18, 3)


def test_inv7_a_lease_below_the_floor_is_not_resumed_and_one_at_it_is(disk: Disk) -> None:
    disk.save(lease(3), lease(3, TEACHER))
    again = disk.restart(floor(40, 17, (POLICY, Term(4)), (TEACHER, Term(3))))
    assert again.leases == (lease(3, TEACHER),)


def test_an_open_update_from_before_the_floor_is_still_found(disk: Disk) -> None:
    again = disk.restart(began(1), UpdateWentGo(UpdateId("u1")), floor(40, 17))
    assert again.open_updates == ((began(1), True),)
