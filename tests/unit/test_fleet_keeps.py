"""Engines that stay at a version while the fleet moves on."""

from __future__ import annotations

import pytest

from controlplane.coordinator import views
from controlplane.core import errors as e
from controlplane.core import fleet_effects as fx
from controlplane.core import fleet_events as events
from controlplane.core.engine_state import Held, Poisoned, Stage
from controlplane.core.fleet import FleetCore
from controlplane.core.fleet_records import EngineKept, EngineReleased, Recovered
from controlplane.core.update_transaction import Phase, UpdateTransaction
from controlplane.core.versions import EngineId, Term, WeightVersion
from tests.support.checkpointed_fleet import carries, keep, kept, publish, served
from tests.support.fleet_core import POLICY, RUN, Fleet

EVAL = EngineId("eval")


def release(f: Fleet, name: str = "eval") -> None:
    f.handle(events.ReleaseRequested(RUN, EngineId(name)))


def fleet() -> tuple[Fleet, dict[str, int], UpdateTransaction]:
    """Three engines at one version, which has a checkpoint; one of them stays there."""
    f, engines, update = served(("e0", "e1", "eval"))
    keep(f, update.version.number)
    return f, engines, update


def moved_on() -> tuple[Fleet, dict[str, int], WeightVersion, WeightVersion]:
    f, engines, first = fleet()
    second = f.push("u2", {name: engines[name] for name in ("e0", "e1")})
    return f, engines, first.version, second.version


def test_a_kept_engine_is_in_no_plan_and_serves_its_version_on() -> None:
    f, engines, first, second = moved_on()
    outcomes = f.core.updates[max(f.core.updates)].outcomes
    assert EVAL not in outcomes
    f.report(engines["eval"], "eval", weights=Held(first, b"d"))
    record = f.core.engines[EVAL]
    assert f.core.model(POLICY).served == (second,)
    assert (f.core.routable(record), f.core.desired(record)) == (True, first)
    assert f.core.served_to(engines["eval"], POLICY) == (first,), "its gate opens for that version alone"
    f.handle(events.Tick())
    assert carries(f) == [], "it holds what it is to hold"


def test_routes_name_a_kept_engine_only_to_who_asks() -> None:
    f, *_ = moved_on()
    for ask, names in ((False, ["e0", "e1"]), (True, ["e0", "e1", "eval"])):
        found = views.routes(f.core, POLICY, 1, kept=ask).routes
        assert [r.engine.engine_id for r in found] == names
        assert [r.engine.engine_id for r in found if r.kept] == names[2:]


def test_a_kept_engine_does_not_count_for_a_policy() -> None:
    f, *_ = served(("eval",))
    keep(f, 1)
    with pytest.raises(e.NoEngines):
        f.begin("u2")


def test_inv9_a_kept_engine_is_no_holder_of_what_the_fleet_serves() -> None:
    f, engines, first = fleet()
    second = f.begin("u2")
    for stage in (Stage.READY, Stage.INSTALLING):
        for name in ("e0", "e1"):
            f.stage(engines[name], name, second, stage)
    f.stage(engines["e0"], "e0", second, Stage.APPLIED)
    f.stage(engines["e1"], "e1", second, Stage.FAILED)
    f.report(engines["e1"], "e1", weights=Poisoned("it broke"))
    assert f.core.engines[EVAL].state.applied == first.version
    assert second.phase is Phase.DEGRADED, "else the fleet would go dark for an engine that is not its own"


def test_inv5_a_version_below_what_the_engine_holds_is_refused_with_both_numbers() -> None:
    f, engines, _ = served(("e0", "eval"))
    publish(f, f.push("u2", engines))
    with pytest.raises(e.StaleVersion) as refused:
        keep(f, 1)
    assert (refused.value.applied, refused.value.got) == (2, 1)
    assert f.core.kept == {}


def test_inv5_its_next_life_is_brought_to_the_kept_version_and_not_to_the_newest() -> None:
    f, _, first, _ = moved_on()
    f.effects.clear()
    f.engine("eval", incarnation="i2")
    assert [(c.engine.engine_id, c.version) for c in carries(f)] == [("eval", first)]


def test_a_kept_engine_is_brought_up_also_while_an_update_is_open() -> None:
    f, _, first, _ = moved_on()
    f.begin("u3")
    f.effects.clear()
    f.engine("eval", incarnation="i2")
    assert [(c.engine.engine_id, c.version) for c in carries(f)] == [("eval", first)]


def test_a_kept_engine_outlives_its_goodbye_and_the_coordinator() -> None:
    f, engines, first, _ = moved_on()
    f.handle(events.SessionEnded(engines["eval"], goodbye=True))
    assert f.core.kept[EVAL].version == first
    again = FleetCore(f.core.settings, Recovered(Term(9), kept=tuple(f.core.kept.values())), f.now)
    assert again.kept == f.core.kept


def test_an_engine_may_be_kept_before_it_comes() -> None:
    f, _, update = served(("e0",))
    with pytest.raises(e.UnknownEngine):
        keep(f, update.version.number)
    keep(f, update.version.number, model=POLICY)
    publish(f, f.push("u2", {"e0": f.core.engines[EngineId("e0")].session or 0}))
    f.engine("eval")
    assert [(c.engine.engine_id, c.version) for c in carries(f)] == [("eval", update.version)]


def test_a_version_without_checkpoint_or_commit_cannot_be_kept() -> None:
    f, *_ = served(("e0",))
    with pytest.raises(e.CheckpointUnknown):
        keep(f, 7, "e0")


def test_an_engine_in_the_middle_of_an_update_is_not_kept_now() -> None:
    f, _, update = served(("e0", "eval"))
    f.begin("u2")
    with pytest.raises(e.UpdateInProgress):
        keep(f, update.version.number)


def test_the_engine_of_a_unit_is_not_kept_alone() -> None:
    f, *_ = served(("e0",))
    f.engine("prefill", unit="pd", unit_size=2)
    with pytest.raises(e.InvalidRequest):
        keep(f, 1, "prefill")


def test_released_it_is_brought_to_what_the_fleet_serves() -> None:
    f, engines, first, second = moved_on()
    f.handle(events.CheckpointPublished(RUN, Term(1), kept(second)))
    f.report(engines["eval"], "eval", weights=Held(first, b"d"))
    f.effects.clear()
    release(f)
    assert [(c.engine.engine_id, c.version) for c in carries(f)] == [("eval", second)]
    release(f)
    with pytest.raises(e.UnknownEngine):
        release(f, "nobody")


def test_keeps_and_releases_are_saved_before_they_are_told() -> None:
    f, _, update = served(("eval",))
    keep(f, update.version.number)
    release(f)
    saved = [x.record for x in f.effects if isinstance(x, fx.Save)]
    assert saved == [EngineKept(EVAL, POLICY, update.version, b"d"), EngineReleased(EVAL)]


def test_a_checkpoint_that_an_engine_stays_at_is_not_given_up() -> None:
    f, _, update = fleet()
    retire = events.CheckpointRetired(RUN, POLICY, Term(1), update.version.number)
    with pytest.raises(e.CheckpointInUse) as refused:
        f.handle(retire)
    assert refused.value.engines == ["eval"]
    release(f)
    f.handle(retire)
    assert f.core.model(POLICY).checkpoints == {}
