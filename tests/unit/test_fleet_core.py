"""The coordinator's decisions: leases and terms, who is required, ready-go-decide, what is routable, restarts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.core import errors as e
from controlplane.core import fleet
from controlplane.core import fleet_events as events
from controlplane.core.engine_state import EngineState, Held, Hold, HoldKind, Life, Poisoned, Progress, Stage, Unset
from controlplane.core.fleet_records import (
    EngineAsked,
    EngineKnown,
    Recovered,
    TermGiven,
    UpdateBegan,
    UpdateDecided,
    UpdateWentGo,
)
from controlplane.core.plan import EnginePlace, LinkFate, RankPlace
from controlplane.core.update_policy import Mode, UpdatePolicy
from controlplane.core.update_transaction import Phase, UpdateTransaction
from controlplane.core.versions import (
    DeviceUuid,
    EngineId,
    Incarnation,
    ModelName,
    Rank,
    RunId,
    Term,
    TrainerId,
    UpdateId,
    WeightVersion,
)
from controlplane.ledger import MemoryLedger

RUN = RunId("run")
POLICY = ModelName("policy")
TTL = 10.0


class Fleet:
    """A coordinator's core with a ledger, and agents that say what they are told to say."""

    def __init__(
        self,
        ledger: MemoryLedger | None = None,
        policy: UpdatePolicy | None = None,
        link_fate: LinkFate = LinkFate.SHARED,
    ) -> None:
        self.ledger = ledger or MemoryLedger()
        self.now = 0.0
        self.settings = fleet.FleetSettings(
            RUN,
            lease_ttl_seconds=TTL,
            step_limit_seconds=60.0,
            policy=policy or UpdatePolicy(),
            link_fate=link_fate,
        )
        self.core = fleet.FleetCore(self.settings, self.ledger.open(RUN), self.now)
        self.states: dict[str, EngineState] = {}
        self.sessions = 100
        self.effects: list[events.Effect] = []
        self.batches: list[list[events.Effect]] = []

    def handle(self, event: events.Event) -> list[events.Effect]:
        effects = self.core.handle(event, self.now)
        for effect in effects:
            if isinstance(effect, events.Save):
                self.ledger.save(effect.record)
        self.effects += effects
        self.batches.append(effects)
        return effects

    def engine(
        self,
        name: str,
        *,
        incarnation: str = "i1",
        devices: tuple[str, ...] = (),
        group: str = "",
        unit: str = "",
        unit_size: int = 0,
        life: int = 0,
    ) -> int:
        """An engine agent says hello, unset. Returns its session."""
        self.sessions += 1
        state = EngineState(RUN, POLICY, EngineId(name), Incarnation(incarnation), Life.RUNNING)
        uuids = tuple(DeviceUuid(d) for d in devices or (f"dev-{name}",))
        place = EnginePlace(EngineId(name), state.incarnation, f"{name}:1", "host", uuids, group, unit, unit_size, life)
        self.states[name] = state
        self.handle(events.EngineConnected(self.sessions, place, state, False, ("checkpoint",), Term(0), Term(0)))
        return self.sessions

    def report(self, session: int, name: str, **changes: object) -> list[events.Effect]:
        """Its next full state; the gate as an agent computes it."""
        state = self.states[name] = replace(self.states[name], **changes)  # type: ignore[arg-type]
        gate = state.gate_open(frozenset(self.core.served_to(session, POLICY)))
        return self.handle(events.EngineReported(session, state, gate))

    def stage(self, session: int, name: str, update: UpdateTransaction, stage: Stage) -> list[events.Effect]:
        progress = Progress(
            update.update_id, update.version, stage, error_reason="X" if stage.value == "failed" else ""
        )
        weights: object = self.states[name].weights
        if stage is Stage.APPLIED:
            weights = Held(update.version, b"d")
        elif stage is Stage.FAILED:
            weights = Poisoned("boom")
        return self.report(session, name, progress=progress, weights=weights)

    def trainer(
        self,
        incarnation: str = "t1",
        *,
        name: str = "trainer",
        held: int = 0,
        ended: str = "",
        takeover: bool = False,
        ranks: tuple[RankPlace, ...] = (RankPlace(Rank(0), "host", DeviceUuid("dev-r0")),),
    ) -> int:
        self.sessions += 1
        self.handle(
            events.TrainerConnected(
                self.sessions,
                RUN,
                POLICY,
                TrainerId(name),
                Incarnation(incarnation),
                ranks,
                Term(held),
                ended,
                takeover,
            )
        )
        return self.sessions

    def begin(self, update_id: str, term: int = 1, request_id: str = "") -> UpdateTransaction:
        effects = self.handle(
            events.UpdateRequested(UpdateId(update_id), request_id or update_id, RUN, POLICY, Term(term), 1, None)
        )
        return next(x.update for x in effects if isinstance(x, events.UpdatePlanned))

    def push(self, update_id: str, engines: dict[str, int], term: int = 1) -> UpdateTransaction:
        """A whole update that every engine applies."""
        update = self.begin(update_id, term)
        for stage in (Stage.READY, Stage.INSTALLING, Stage.APPLIED):
            for name, session in engines.items():
                self.stage(session, name, update, stage)
        for name, session in engines.items():
            self.report(session, name)
        return update

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.handle(events.Tick())

    @property
    def served(self) -> tuple[WeightVersion, ...]:
        return self.core.model(POLICY).served


@pytest.fixture
def two() -> tuple[Fleet, dict[str, int]]:
    """Two engines and a trainer that holds term 1."""
    f = Fleet()
    engines = {name: f.engine(name) for name in ("e0", "e1")}
    f.trainer()
    return f, engines


def test_ready_go_decide(two: tuple[Fleet, dict[str, int]]) -> None:
    f, engines = two
    update = f.begin("u1")
    assert update.version == WeightVersion(1, Term(1))
    f.stage(engines["e0"], "e0", update, Stage.READY)
    assert update.phase.value == "preparing"
    f.stage(engines["e1"], "e1", update, Stage.READY)
    assert update.phase is Phase.GO
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    assert (update.phase, f.served) == (Phase.GO, ())
    f.stage(engines["e1"], "e1", update, Stage.APPLIED)
    assert (update.phase, f.served) == (Phase.COMMITTED, (update.version,))
    assert f.core.model(POLICY).ordinal == 1


def test_inv9_every_record_is_saved_before_anything_is_told(two: tuple[Fleet, dict[str, int]]) -> None:
    f, engines = two
    f.push("u1", engines)
    kinds = {type(x.record) for batch in f.batches for x in batch if isinstance(x, events.Save)}
    assert {UpdateBegan, UpdateWentGo, UpdateDecided} <= kinds
    for batch in f.batches:
        told = [not isinstance(x, events.Save) for x in batch]
        assert told == sorted(told)


def test_an_engine_that_refuses_before_go_fails_the_update_and_costs_nothing(
    two: tuple[Fleet, dict[str, int]],
) -> None:
    f, engines = two
    first = f.push("u1", engines)
    update = f.begin("u2")
    f.stage(engines["e0"], "e0", update, Stage.READY)
    f.stage(engines["e1"], "e1", update, Stage.ABORTED)
    assert (update.phase, f.served) == (Phase.FAILED, (first.version,))
    assert "e1 aborted" in update.cause


def test_p3_one_of_two_installs_fails_the_other_serves_and_the_reply_names_both(
    two: tuple[Fleet, dict[str, int]],
) -> None:
    f, engines = two
    f.push("u1", engines)
    update = f.begin("u2")
    for name, session in engines.items():
        f.stage(session, name, update, Stage.READY)
    for name, session in engines.items():
        f.report(session, name, weights=Unset(), progress=Progress(update.update_id, update.version, Stage.INSTALLING))
    f.stage(engines["e0"], "e0", update, Stage.FAILED)
    f.stage(engines["e1"], "e1", update, Stage.APPLIED)
    assert (update.phase, f.served) == (Phase.DEGRADED, (update.version,))
    assert [str(o) for _, o in sorted(update.outcomes.items())] == ["e0 failed (X: )", "e1 applied"]


def test_after_go_the_old_version_is_served_on_while_a_live_engine_holds_it(two: tuple[Fleet, dict[str, int]]) -> None:
    f, engines = two
    first = f.push("u1", engines)
    update = f.begin("u2")
    for name, session in engines.items():
        f.stage(session, name, update, Stage.READY)
    f.stage(engines["e0"], "e0", update, Stage.ABORTED)
    f.stage(engines["e1"], "e1", update, Stage.APPLIED)
    assert (update.phase, f.served) == (Phase.FAILED, (first.version,))


def test_a_new_incarnation_in_mid_update_is_a_lost_engine(two: tuple[Fleet, dict[str, int]]) -> None:
    f, engines = two
    update = f.begin("u1")
    for name, session in engines.items():
        f.stage(session, name, update, Stage.READY)
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    f.engine("e1", incarnation="i2")
    assert update.phase is Phase.DEGRADED
    assert update.outcomes[EngineId("e1")].lost


def test_inv9_an_engine_that_applied_and_died_before_the_decision_does_not_count(
    two: tuple[Fleet, dict[str, int]],
) -> None:
    f, engines = two
    update = f.begin("u1")
    for name, session in engines.items():
        f.stage(session, name, update, Stage.READY)
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    f.engine("e0", incarnation="i2")
    f.stage(engines["e1"], "e1", update, Stage.FAILED)
    assert (update.phase, f.served) == (Phase.FAILED, ())


def test_silence_after_go_ends_within_the_leases_time(two: tuple[Fleet, dict[str, int]]) -> None:
    f, engines = two
    update = f.begin("u1")
    for name, session in engines.items():
        f.stage(session, name, update, Stage.READY)
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    f.now += TTL
    f.report(engines["e0"], "e0")
    f.pass_time(1.0)
    assert update.phase is Phase.DEGRADED


def test_an_update_that_is_not_ready_in_time_fails(two: tuple[Fleet, dict[str, int]]) -> None:
    f, engines = two
    update = f.begin("u1")
    for _ in range(40):
        f.now += TTL - 1
        for name, session in engines.items():
            f.report(session, name)
        f.handle(events.Tick())
    assert update.phase is Phase.FAILED
    assert "not ready in time: e0, e1" in update.cause


def test_required_are_the_routable_and_the_rest_is_optional(two: tuple[Fleet, dict[str, int]]) -> None:
    f, engines = two
    f.push("u1", engines)
    engines["late"] = f.engine("late")
    update = f.begin("u2")
    assert {a.engine.engine_id: a.required for a in update.plan.assignments} == {"e0": True, "e1": True, "late": False}
    for name in ("e0", "e1"):
        f.stage(engines[name], name, update, Stage.READY)
    assert update.phase is Phase.GO


def test_a_held_engine_is_no_longer_required(two: tuple[Fleet, dict[str, int]]) -> None:
    f, engines = two
    f.push("u1", engines)
    f.report(engines["e0"], "e0", holds=frozenset({Hold(HoldKind.OPERATOR, "me")}))
    update = f.begin("u2")
    assert [a.required for a in update.plan.assignments] == [False, True]


def test_an_empty_plan_is_refused_and_uses_no_number_up() -> None:
    f = Fleet()
    f.trainer()
    with pytest.raises(e.NoEngines):
        f.begin("u1")
    f.engine("e0")
    assert f.begin("u2").version.number == 1


def test_a_second_begin_is_refused_and_a_repeat_gets_the_same_answer(two: tuple[Fleet, dict[str, int]]) -> None:
    f, _ = two
    first = f.begin("u1", request_id="r1")
    assert f.begin("u2", request_id="r1") is first
    with pytest.raises(e.UpdateInProgress):
        f.begin("u3", request_id="r3")


# ---- leases ----


def test_p5_a_lease_is_held_until_its_time_ends(two: tuple[Fleet, dict[str, int]]) -> None:
    f, _ = two
    with pytest.raises(e.LeaseHeld) as refusal:
        f.trainer("t2", name="other")
    assert (refusal.value.holder, refusal.value.term) == ("trainer", 1)
    f.now += TTL
    f.trainer("t2", name="other")
    assert f.core.model(POLICY).term == 2


def test_takeover_and_proof_of_death_need_not_wait(two: tuple[Fleet, dict[str, int]]) -> None:
    f, _ = two
    f.trainer("t2", ended="t1")
    assert f.core.model(POLICY).term == 2
    f.trainer("t3", name="other", takeover=True)
    assert f.core.model(POLICY).term == 3


def test_expiry_alone_fences_nobody(two: tuple[Fleet, dict[str, int]]) -> None:
    f, engines = two
    f.now += 100 * TTL
    for name, session in engines.items():
        f.report(session, name)
    assert f.begin("u1").version.term == 1


def test_a_lease_is_not_renewed_by_life_without_progress(two: tuple[Fleet, dict[str, int]]) -> None:
    f, _ = two
    session = f.sessions
    for _ in range(15):
        f.now += 6.0
        f.handle(events.TrainerReported(session, Term(1), 0, "train", 1))
    assert f.now > 60.0 + TTL
    f.trainer("t2", name="other")
    assert f.core.model(POLICY).term == 2


def test_inv7_a_fenced_trainer_cannot_begin_and_its_session_is_told(two: tuple[Fleet, dict[str, int]]) -> None:
    f, _ = two
    zombie = f.sessions
    update = f.begin("u1")
    f.trainer("t2", name="other", takeover=True)
    assert update.phase is Phase.FAILED
    closed = [x for x in f.effects if isinstance(x, events.CloseSession) and x.session == zombie]
    assert isinstance(closed[0].error, e.StaleTerm)
    with pytest.raises(e.StaleTerm):
        f.begin("u2", term=1)
    with pytest.raises(e.StaleTerm):
        f.trainer("t1", held=1)


def test_inv7_go_outlives_a_takeover(two: tuple[Fleet, dict[str, int]]) -> None:
    f, engines = two
    update = f.begin("u1")
    for name, session in engines.items():
        f.stage(session, name, update, Stage.READY)
    f.trainer("t2", name="other", takeover=True)
    assert update.phase is Phase.GO
    for name, session in engines.items():
        f.stage(session, name, update, Stage.APPLIED)
    assert f.served == (update.version,)


def test_a_broken_session_is_resumed_under_the_same_term(two: tuple[Fleet, dict[str, int]]) -> None:
    f, _ = two
    f.handle(events.SessionEnded(f.sessions, goodbye=False))
    f.now += 100.0
    f.trainer("t1", held=1)
    assert f.core.model(POLICY).term == 1


# ---- routes ----


def test_inv10_routable_needs_gate_session_and_served_version(two: tuple[Fleet, dict[str, int]]) -> None:
    f, engines = two
    f.push("u1", engines)
    record = f.core.engines[EngineId("e0")]
    assert f.core.routable(record)
    f.handle(events.SessionEnded(engines["e0"], goodbye=False))
    assert not f.core.routable(record)
    assert f.core.routable(f.core.engines[EngineId("e1")])


def test_l1_a_replacement_is_not_routable_before_it_holds_what_is_served(two: tuple[Fleet, dict[str, int]]) -> None:
    f, engines = two
    f.push("u1", engines)
    f.engine("e0", incarnation="i2")
    assert not f.core.routable(f.core.engines[EngineId("e0")])


def test_l2_an_old_lifes_words_are_refused(two: tuple[Fleet, dict[str, int]]) -> None:
    f, engines = two
    new = f.engine("e0", incarnation="i2")
    assert f.handle(events.EngineReported(engines["e0"], f.states["e0"], True)) == []
    stale = replace(f.states["e0"], incarnation=Incarnation("i1"))
    with pytest.raises(e.WrongIncarnation):
        f.handle(events.EngineReported(new, stale, True))


def test_l2_a_hello_of_an_earlier_life_that_arrives_late_is_refused(two: tuple[Fleet, dict[str, int]]) -> None:
    f, _ = two
    f.engine("e0", incarnation="i3", life=3)
    with pytest.raises(e.WrongIncarnation) as refused:
        f.engine("e0", incarnation="i2", life=2)
    assert (refused.value.expected, refused.value.got) == ("i3", "i2")
    assert f.core.engines[EngineId("e0")].state.incarnation == "i3"
    f.engine("e0", incarnation="i4", life=4)
    f.engine("e0", incarnation="of an agent without a disk")


def test_inv8_silence_is_unknown(two: tuple[Fleet, dict[str, int]]) -> None:
    f, engines = two
    f.push("u1", engines)
    f.pass_time(TTL + 1)
    assert all(r.session is None for r in f.core.engines.values())


def test_some_but_not_all_of_an_engines_devices_is_a_misfit_at_its_hello() -> None:
    f = Fleet()
    f.trainer(ranks=(RankPlace(Rank(0), "host", DeviceUuid("d0")),))
    with pytest.raises(e.EngineMisfit) as refusal:
        f.engine("wide", devices=("d0", "d1"))
    assert (refusal.value.held, refusal.value.total, refusal.value.missing) == (1, 2, ["d1"])


# ---- restart ----


def test_a_restart_waits_for_the_engines_it_knew(two: tuple[Fleet, dict[str, int]]) -> None:
    f, engines = two
    f.push("u1", engines)
    again = Fleet(f.ledger)
    assert again.core.recovering
    assert again.core.term == 2
    again.trainer("t1", held=1)
    with pytest.raises(e.CoordinatorRecovering):
        again.begin("u2")
    again.engine("e0")
    again.engine("e1")
    assert not again.core.recovering
    assert again.begin("u2").version.number == 2


def test_a_restart_does_not_wait_longer_than_a_lease(two: tuple[Fleet, dict[str, int]]) -> None:
    f, _ = two
    again = Fleet(f.ledger)
    again.engine("e0")
    again.pass_time(TTL)
    assert not again.core.recovering


def test_a_restart_aborts_what_had_no_go_and_decides_what_had_from_reports() -> None:
    began = UpdateBegan(
        UpdateId("u"),
        "r",
        POLICY,
        WeightVersion(5, Term(1)),
        3,
        (EngineAsked(EngineId("e0"), Incarnation("i1"), True),),
    )
    for went_go, stage, expected in ((False, Stage.READY, Phase.FAILED), (True, Stage.APPLIED, Phase.COMMITTED)):
        ledger = MemoryLedger()
        ledger.open(RUN)
        ledger.save(TermGiven(POLICY, Term(1), TrainerId("t"), Incarnation("t1")))
        ledger.save(EngineKnown(EngineId("e0"), POLICY))
        ledger.save(began)
        if went_go:
            ledger.save(UpdateWentGo(UpdateId("u")))
        f = Fleet(ledger)
        update = f.core.updates[UpdateId("u")]
        session = f.engine("e0")
        f.stage(session, "e0", update, stage)
        f.handle(events.Tick())
        assert update.phase is expected


def test_l7_another_runs_hello_and_update_are_refused(two: tuple[Fleet, dict[str, int]]) -> None:
    f, _ = two
    with pytest.raises(e.WrongRun):
        f.handle(events.UpdateRequested(UpdateId("u"), "r", RunId("other"), POLICY, Term(1), 1, None))
    state = replace(f.states["e0"], run_id=RunId("other"))
    place = f.core.engines[EngineId("e0")].place
    with pytest.raises(e.WrongRun):
        f.handle(events.EngineConnected(1, place, state, False, (), Term(0), Term(0)))


def test_an_empty_ledger_recovers_nothing() -> None:
    core = fleet.FleetCore(fleet.FleetSettings(RUN), Recovered(Term(1)), 0.0)
    assert not core.recovering


def test_a_ledger_older_than_what_engines_applied_keeps_it_recovering() -> None:
    f = Fleet()
    f.trainer()
    state = EngineState(RUN, POLICY, EngineId("e0"), Incarnation("i1"), Life.RUNNING)
    place = EnginePlace(EngineId("e0"), state.incarnation, "e0:1", "host", (DeviceUuid("d"),))
    f.handle(events.EngineConnected(1, place, state, False, (), Term(1), Term(1), max_number=7))
    assert f.core.recovering
    with pytest.raises(e.LedgerRegressed) as refused:
        f.begin("u1")
    assert (refused.value.what, refused.value.known, refused.value.seen) == ("number", 0, 7)


def test_a_coordinator_that_stood_still_itself_judges_nobodys_silence_in_it(
    two: tuple[Fleet, dict[str, int]],
) -> None:
    f, engines = two
    update = f.begin("u1")
    for name, session in engines.items():
        f.stage(session, name, update, Stage.READY)
    f.now += 20 * TTL
    f.handle(events.Paused(20 * TTL))
    f.handle(events.Tick())
    for name, session in engines.items():
        f.stage(session, name, update, Stage.APPLIED)
    assert update.phase is Phase.COMMITTED
    with pytest.raises(e.LeaseHeld):
        f.trainer("t2", name="other")


# ---- policies ----


def of_policy(policy: UpdatePolicy, names: tuple[str, ...] = ("e0", "e1", "e2")) -> tuple[Fleet, dict[str, int]]:
    """A fleet with a first version committed."""
    f = Fleet(policy=policy)
    engines = {name: f.engine(name) for name in names}
    f.trainer()
    f.push("u0", engines)
    return f, engines


def test_a_quorum_goes_without_the_one_that_refused_and_commits_without_the_one_that_failed() -> None:
    f, engines = of_policy(UpdatePolicy(quorum=1))
    update = f.begin("u1")
    f.stage(engines["e0"], "e0", update, Stage.ABORTED)
    f.stage(engines["e1"], "e1", update, Stage.READY)
    assert update.phase.value == "preparing", "the third may still get ready"
    f.stage(engines["e2"], "e2", update, Stage.READY)
    assert update.phase.value == "go"
    f.stage(engines["e1"], "e1", update, Stage.FAILED)
    f.stage(engines["e2"], "e2", update, Stage.APPLIED)
    assert (update.phase, f.served) == (Phase.COMMITTED, (update.version,))
    assert "e0 aborted" in update.cause
    assert "e1 failed" in update.cause


def test_a_quorum_that_cannot_be_reached_any_more_fails_at_once() -> None:
    f, engines = of_policy(UpdatePolicy(quorum=2))
    update = f.begin("u1")
    f.stage(engines["e0"], "e0", update, Stage.ABORTED)
    f.stage(engines["e1"], "e1", update, Stage.ABORTED)
    assert update.phase is Phase.FAILED


def test_at_the_deadline_a_quorum_goes_without_the_slow() -> None:
    f, engines = of_policy(UpdatePolicy(quorum=2))
    update = f.begin("u1")
    for name in ("e0", "e1"):
        f.stage(engines[name], name, update, Stage.READY)
    for _ in range(40):
        f.now += TTL - 1
        for name, session in engines.items():
            f.report(session, name)
        f.handle(events.Tick())
    assert update.outcomes[EngineId("e2")].lost
    assert update.phase is Phase.GO


def test_rolling_serves_both_versions_from_the_first_engine_to_the_last() -> None:
    f, engines = of_policy(UpdatePolicy(Mode.ROLLING))
    old = f.served[0]
    update = f.begin("u1")
    for name, session in engines.items():
        f.stage(session, name, update, Stage.READY)
    assert list(f.served) == [old]
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    assert [*f.served, f.core.model(POLICY).ordinal] == [old, update.version, 2]
    for name in ("e1", "e2"):
        f.stage(engines[name], name, update, Stage.APPLIED)
    assert (update.phase, f.served, f.core.model(POLICY).ordinal) == (Phase.COMMITTED, (update.version,), 2)


def test_a_rolling_update_whose_second_engine_fails_is_not_taken_back() -> None:
    f, engines = of_policy(UpdatePolicy(Mode.ROLLING))
    update = f.begin("u1")
    for name, session in engines.items():
        f.stage(session, name, update, Stage.READY)
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    f.stage(engines["e1"], "e1", update, Stage.FAILED)
    f.stage(engines["e2"], "e2", update, Stage.ABORTED)
    assert (update.phase, f.served) == (Phase.DEGRADED, (update.version,))


def test_a_rolling_update_that_nobody_alive_holds_any_more_leaves_the_old_version_served() -> None:
    f, engines = of_policy(UpdatePolicy(Mode.ROLLING), ("e0", "e1"))
    old = f.served[0]
    update = f.begin("u1")
    for name, session in engines.items():
        f.stage(session, name, update, Stage.READY)
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    f.engine("e0", incarnation="i2")
    f.stage(engines["e1"], "e1", update, Stage.ABORTED)
    assert f.served == (old, update.version)


def test_a_restart_in_the_middle_of_a_rolling_update_knows_that_both_are_served() -> None:
    f, engines = of_policy(UpdatePolicy(Mode.ROLLING))
    old = f.served[0]
    update = f.begin("u1")
    for name, session in engines.items():
        f.stage(session, name, update, Stage.READY)
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    again = Fleet(f.ledger, UpdatePolicy(Mode.ROLLING))
    assert again.served == (old, update.version)
    assert again.core.updates[update.update_id].rolled
