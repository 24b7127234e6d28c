"""What an update needs: groups with a minimum, units that count together, and engines that go waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from controlplane.core import errors as e
from controlplane.core import fleet_effects as fx
from controlplane.core import fleet_events as events
from controlplane.core.engine_state import Held, Hold, HoldKind, Poisoned, Progress, Residency, Stage
from controlplane.core.fleet_begins import MISSES_BEFORE_AWAITED
from controlplane.core.fleet_updates import PATIENCE_AFTER_WAITING
from controlplane.core.update_policy import Mode, UpdatePolicy
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import EngineId
from tests.support.fleet_core import POLICY, Fleet


def grouped(policy: UpdatePolicy, **groups: str) -> tuple[Fleet, dict[str, int]]:
    """Engines by name with their group, a trainer, and a first version everywhere."""
    f = Fleet(policy=policy)
    engines = {name: f.engine(name, group=group) for name, group in groups.items()}
    f.trainer()
    f.push("u0", engines)
    return f, engines


# ---- min_engines ----


def test_a_group_below_its_minimum_refuses_the_update_with_both_numbers() -> None:
    f = Fleet(policy=UpdatePolicy(min_engines={"decode": 2}))
    f.engine("e0", group="decode")
    f.trainer()
    with pytest.raises(e.NotEnoughEngines) as refused:
        f.begin("u1")
    assert (refused.value.group, refused.value.live, refused.value.needed) == ("decode", 1, 2)
    assert not f.core.updates


def test_a_quorum_does_not_go_with_a_group_below_its_minimum() -> None:
    policy = UpdatePolicy(quorum=1, min_engines={"eval": 1})
    f, engines = grouped(policy, a="rollout", b="rollout", c="eval")
    update = f.begin("u1")
    f.stage_all({"a": engines["a"], "b": engines["b"]}, update, Stage.READY)
    assert update.phase.value == "preparing"
    f.stage(engines["c"], "c", update, Stage.ABORTED)
    assert update.phase is Phase.FAILED


def test_a_quorum_does_not_commit_with_a_group_below_its_minimum() -> None:
    policy = UpdatePolicy(quorum=1, min_engines={"eval": 1})
    f, engines = grouped(policy, a="rollout", b="rollout", c="eval")
    served = f.served
    update = f.begin("u1")
    f.stage_all(engines, update, Stage.READY, Stage.INSTALLING)
    f.stage(engines["c"], "c", update, Stage.FAILED)
    f.stage(engines["a"], "a", update, Stage.APPLIED)
    f.stage(engines["b"], "b", update, Stage.ABORTED)
    # b still holds what is served, so there is something to fall back to
    assert (update.phase, f.served) == (Phase.FAILED, served)


def test_with_the_minimum_of_each_group_a_quorum_commits() -> None:
    policy = UpdatePolicy(quorum=1, min_engines={"eval": 1})
    f, engines = grouped(policy, a="rollout", b="rollout", c="eval")
    update = f.begin("u1")
    f.stage_all(engines, update, Stage.READY, Stage.INSTALLING)
    f.stage(engines["a"], "a", update, Stage.FAILED)
    f.stage(engines["b"], "b", update, Stage.APPLIED)
    f.stage(engines["c"], "c", update, Stage.APPLIED)
    assert update.phase is Phase.COMMITTED
    assert "a failed" in update.cause


# ---- units ----


def pair(policy: UpdatePolicy | None = None) -> tuple[Fleet, dict[str, int]]:
    """Prefill and decode as one unit, and an engine by itself."""
    f = Fleet(policy=policy)
    engines = {name: f.engine(name, unit="pd0", unit_size=2) for name in ("p", "d")}
    engines["alone"] = f.engine("alone")
    f.trainer()
    return f, engines


def test_a_unit_serves_only_what_all_of_it_holds() -> None:
    f, engines = pair()
    update = f.push("u1", engines)
    assert all(f.core.routable(r) for r in f.core.engines.values())
    f.report(engines["d"], "d", weights=Poisoned("spans"))
    assert f.core.served_to(engines["p"], POLICY) == ()
    assert f.core.served_to(engines["alone"], POLICY) == (update.version,)
    assert not f.core.routable(f.core.engines[EngineId("p")])
    assert f.core.routable(f.core.engines[EngineId("alone")])


def test_the_members_of_a_unit_are_told_when_one_of_them_changes() -> None:
    f, engines = pair()
    f.push("u1", engines)
    f.effects.clear()
    f.report(engines["alone"], "alone", weights=Poisoned("spans"))
    assert not any(isinstance(x, fx.BroadcastState) for x in f.effects)
    f.report(engines["d"], "d", weights=Poisoned("spans"))
    assert any(isinstance(x, fx.BroadcastState) for x in f.effects)


def test_a_unit_with_a_silent_or_missing_member_is_not_routed() -> None:
    f, engines = pair()
    f.push("u1", engines)
    f.handle(events.SessionEnded(engines["d"], goodbye=False))
    assert not f.core.routable(f.core.engines[EngineId("p")])
    lonely = Fleet()
    session = lonely.engine("p", unit="pd0", unit_size=2)
    lonely.trainer()
    lonely.push("u1", {"p": session})
    assert not lonely.core.routable(lonely.core.engines[EngineId("p")])


def test_inv10_a_unit_with_two_served_versions_is_not_routed_whatever_its_gates_say() -> None:
    f, engines = pair(UpdatePolicy(Mode.ROLLING))
    f.push("u0", engines)
    update = f.begin("u1")
    f.stage_all(engines, update, Stage.READY, Stage.INSTALLING)
    f.stage(engines["alone"], "alone", update, Stage.APPLIED)
    f.stage(engines["p"], "p", update, Stage.APPLIED)
    assert len(f.served) == 2
    for name in ("p", "d"):
        f.handle(events.EngineReported(engines[name], f.states[name], gate_open=True))
    assert not f.core.routable(f.core.engines[EngineId("p")])
    assert not f.core.routable(f.core.engines[EngineId("d")])


def test_one_failed_member_fails_its_unit_for_the_quorum() -> None:
    f, engines = pair(UpdatePolicy(quorum=2))
    f.push("u0", engines)
    update = f.begin("u1")
    f.stage_all(engines, update, Stage.READY, Stage.INSTALLING)
    f.stage(engines["d"], "d", update, Stage.FAILED)
    f.stage(engines["p"], "p", update, Stage.APPLIED)
    f.stage(engines["alone"], "alone", update, Stage.ABORTED)
    assert update.phase is Phase.FAILED  # two engines of three, but not one whole unit


def test_while_rolling_a_unit_moves_when_all_of_it_applied() -> None:
    f, engines = pair(UpdatePolicy(Mode.ROLLING))
    first = f.push("u0", engines)
    update = f.begin("u1")
    f.stage_all(engines, update, Stage.READY, Stage.INSTALLING)
    f.stage(engines["p"], "p", update, Stage.APPLIED)
    assert list(f.served) == [first.version]
    f.stage(engines["d"], "d", update, Stage.APPLIED)
    assert list(f.served) == [first.version, update.version]
    assert f.core.served_to(engines["p"], POLICY) == (update.version,)


def test_all_members_of_a_required_unit_are_required() -> None:
    f, engines = pair()
    f.push("u0", engines)
    f.report(engines["d"], "d", weights=Poisoned("spans"))  # so only `alone` is routable
    update = f.begin("u1")
    assert {o.engine_id for o in update.required} == {"alone"}
    f.report(engines["d"], "d")
    g, engines = pair()
    g.push("u0", engines)
    assert len(g.begin("u1").required) == 3


# ---- engines that come too late again and again ----


def joined() -> tuple[Fleet, dict[str, int], int]:
    """One engine that serves, and a slow one that joined."""
    f = Fleet()
    engines = {"e0": f.engine("e0")}
    f.trainer()
    f.push("u0", engines)
    return f, engines, f.engine("slow")


def test_an_engine_that_misses_update_after_update_is_waited_for() -> None:
    f, engines, slow = joined()
    for i in range(MISSES_BEFORE_AWAITED):
        update = f.push(f"missed{i}", engines)
        assert not update.outcomes[EngineId("slow")].awaited
    update = f.begin("u")
    assert update.outcomes[EngineId("slow")].awaited
    f.stage(engines["e0"], "e0", update, Stage.READY)
    assert update.phase.value == "preparing"
    f.stage(slow, "slow", update, Stage.READY)
    assert update.phase.value == "go"
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    assert update.phase is Phase.COMMITTED
    f.stage(slow, "slow", update, Stage.APPLIED)
    assert f.core.engines[EngineId("slow")].missed == 0


def test_a_joiner_is_not_waited_for_longer_than_the_limit_and_then_not_again_soon() -> None:
    f, engines, _ = joined()
    for i in range(MISSES_BEFORE_AWAITED):
        f.push(f"missed{i}", engines)
    update = f.begin("u")
    f.stage(engines["e0"], "e0", update, Stage.READY)
    for _ in range(4):
        f.now += f.settings.await_limit_seconds / 4 + 0.1
        for name, session in f_sessions(f):
            f.handle(events.EngineReported(session, f.states[name], False))
        f.handle(events.Tick())
    assert update.phase.value == "go"
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    assert update.phase is Phase.COMMITTED
    assert f.core.engines[EngineId("slow")].missed == -PATIENCE_AFTER_WAITING


def f_sessions(f: Fleet) -> list[tuple[str, int]]:
    return [(str(i), r.session) for i, r in f.core.engines.items() if r.session is not None]


def test_one_that_fails_is_not_waited_for() -> None:
    f, engines, slow = joined()
    for i in range(MISSES_BEFORE_AWAITED + 1):
        update = f.begin(f"u{i}")
        f.stage(slow, "slow", update, Stage.FAILED)
        f.stage_all(engines, update, Stage.READY, Stage.INSTALLING, Stage.APPLIED)
    assert not f.begin("last").outcomes[EngineId("slow")].awaited


# ---- who cannot take part ----


@pytest.mark.parametrize(
    "change",
    [
        {"residency": Residency.ASLEEP},
        {"residency": Residency.WEIGHTS},
        {"holds": frozenset({Hold(HoldKind.DRAINING, "ann")})},
    ],
)
def test_an_engine_that_sleeps_or_drains_is_not_planned_for(change: dict[str, object]) -> None:
    f, engines = grouped(UpdatePolicy(), a="", b="")
    f.report(engines["b"], "b", **change)
    update = f.begin("u1")
    assert set(update.outcomes) == {"a"}


@pytest.mark.parametrize(
    ("owners", "holds_devices", "planned"),
    [
        (["trainer:trainer"], True, {"a", "b"}),
        (["trainer:trainer"], False, {"a"}),
        (["trainer:other"], True, {"a"}),
        (["ann"], True, {"a"}),
        (["trainer:trainer", "ann"], True, {"a"}),
    ],
)
def test_an_engine_that_sleeps_for_its_own_trainer_only_is_planned_for(
    owners: list[str], holds_devices: bool, planned: set[str]
) -> None:
    f, engines = grouped(UpdatePolicy(), a="", b="")
    (record,) = f.core.trainers.values()
    assert record.session is not None
    f.handle(events.TrainerReported(record.session, record.term, 1, "train", 1, holds_devices))
    asleep = frozenset(Hold(HoldKind.ASLEEP, owner) for owner in owners)
    f.report(engines["b"], "b", residency=Residency.ASLEEP, holds=asleep)
    assert set(f.begin("u1").outcomes) == planned


def test_inv6_two_engines_with_other_contents_of_one_version_are_a_conflict() -> None:
    f, engines = grouped(UpdatePolicy(), a="", b="")
    update = f.begin("u1")
    f.stage_all(engines, update, Stage.READY, Stage.INSTALLING)
    f.stage(engines["a"], "a", update, Stage.APPLIED)
    progress = Progress(update.update_id, update.version, Stage.APPLIED)
    f.report(engines["b"], "b", progress=progress, weights=Held(update.version, b"other"))
    assert update.phase is Phase.DEGRADED
    assert update.outcomes[EngineId("b")].error_reason == "VERSION_CONFLICT"
    record = f.core.engines[EngineId("b")]
    f.handle(events.EngineReported(engines["b"], replace(record.state, live_requests=1), gate_open=True))
    assert not f.core.routable(record)
