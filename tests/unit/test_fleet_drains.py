"""An engine that begins to drain in the middle of an update leaves it: the others go on, if there are any."""

from __future__ import annotations

import pytest

from controlplane.core import errors as e
from controlplane.core import fleet_events as events
from controlplane.core.engine_state import Hold, HoldKind, Stage
from controlplane.core.update_policy import UpdatePolicy
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import EngineId, UpdateId
from tests.support.checkpointed_fleet import served
from tests.support.fleet_core import POLICY, RUN, Fleet

DRAINS = frozenset({Hold(HoldKind.DRAINING, "ann")})


def fleet(count: int, policy: UpdatePolicy | None = None, *, units: bool = False) -> tuple[Fleet, dict[str, int]]:
    """Engines that serve a version, in pairs or alone, and their trainer."""
    f = Fleet(policy=policy)
    names = [f"e{i}" for i in range(count)]
    size = 2 if units else 0
    engines = {n: f.engine(n, unit=f"pair{i // 2}" if units else "", unit_size=size) for i, n in enumerate(names)}
    f.trainer()
    f.push("u1", engines)
    return f, engines


def required(f: Fleet, update_id: str) -> list[str]:
    return sorted(o.engine_id for o in f.core.updates[UpdateId(update_id)].required)


def test_who_drains_before_go_is_required_no_more_and_the_others_commit() -> None:
    f, engines = fleet(2)
    update = f.begin("u2")
    f.stage(engines["e0"], "e0", update, Stage.READY)
    f.report(engines["e1"], "e1", holds=DRAINS)
    assert (update.phase, required(f, "u2")) == (Phase.GO, ["e0"])
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    assert (update.phase, f.served) == (Phase.COMMITTED, (update.version,))


def test_who_drains_after_go_and_before_its_commit_frame_leaves_too() -> None:
    f, engines = fleet(2)
    update = f.begin("u2")
    f.stage_all(engines, update, Stage.READY)
    f.report(engines["e1"], "e1", holds=DRAINS)
    f.stage(engines["e1"], "e1", update, Stage.ABORTED)
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    assert (update.phase, f.served) == (Phase.COMMITTED, (update.version,))


def test_inv9_a_restarted_coordinator_comes_to_the_same_decision() -> None:
    f, engines = fleet(2)
    update = f.begin("u2")
    f.stage(engines["e0"], "e0", update, Stage.READY)
    f.report(engines["e1"], "e1", holds=DRAINS)
    again = Fleet(f.ledger)
    for name in engines:
        session = again.engine(name)
        again.states[name] = f.states[name]
        again.report(session, name)
        engines[name] = session
    again.trainer(held=1)
    again.stage(engines["e0"], "e0", update, Stage.APPLIED)
    assert (again.core.updates[update.update_id].phase, again.served) == (Phase.COMMITTED, (update.version,))


def test_inv9_somebody_must_be_required_whoever_drains() -> None:
    f, engines = fleet(2)
    before, update = f.served, f.begin("u2")
    for name, session in engines.items():
        f.report(session, name, holds=DRAINS)
        f.stage(session, name, update, Stage.ABORTED)
    assert (update.phase, f.served) == (Phase.FAILED, before)


def test_inv9_who_drains_with_the_update_in_its_weights_is_waited_for() -> None:
    f, engines = fleet(2)
    update = f.begin("u2")
    f.stage_all(engines, update, Stage.READY, Stage.INSTALLING)
    f.report(engines["e1"], "e1", holds=DRAINS)
    f.stage(engines["e0"], "e0", update, Stage.APPLIED)
    assert (update.phase, required(f, "u2")) == (Phase.GO, ["e0", "e1"])
    f.stage(engines["e1"], "e1", update, Stage.FAILED)
    assert update.phase is Phase.DEGRADED


def test_a_unit_leaves_as_a_whole() -> None:
    """One of its members that applies serves nothing by itself, so it must not count for the quorum."""
    f, engines = fleet(4, units=True)
    update = f.begin("u2")
    f.report(engines["e1"], "e1", holds=DRAINS)
    assert required(f, "u2") == ["e2", "e3"]
    for stage in (Stage.READY, Stage.APPLIED):
        f.stage(engines["e0"], "e0", update, stage)
    phases = [update.phase]
    for name in ("e2", "e3"):
        f.stage(engines[name], name, update, Stage.READY)
        phases.append(update.phase)
    assert phases == [Phase.PREPARING, Phase.PREPARING, Phase.GO]


def test_a_groups_minimum_still_counts_who_is_left() -> None:
    f = Fleet(policy=UpdatePolicy(quorum=1, min_engines={"eval": 1}))
    engines = {"e0": f.engine("e0"), "e1": f.engine("e1", group="eval")}
    f.trainer()
    f.push("u1", engines)
    update = f.begin("u2")
    f.report(engines["e1"], "e1", holds=DRAINS)
    f.stage(engines["e1"], "e1", update, Stage.ABORTED)
    f.stage(engines["e0"], "e0", update, Stage.READY)
    assert update.phase is Phase.FAILED


@pytest.mark.parametrize(
    ("error", "phase"),
    [(e.EngineDraining("e1", "ann"), Phase.GO), (e.EngineAsleep("e1", "the KV cache is"), Phase.FAILED)],
)
def test_a_rollback_goes_on_without_who_refuses_it_because_it_drains(error: e.WeightplaneError, phase: Phase) -> None:
    """The refusal may come before the report of the drain."""
    f, engines, first = served(("e0", "e1"))
    f.handle(events.RollbackRequested(UpdateId("r"), "r", RUN, POLICY, first.version.number))
    rollback = f.core.updates[UpdateId("r")]
    f.stage(engines["e0"], "e0", rollback, Stage.READY)
    f.handle(events.CarryEnded(UpdateId("r"), EngineId("e1"), error))
    assert rollback.phase is phase
