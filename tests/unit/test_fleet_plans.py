"""The plans of a fleet: from what its engines report and its trainer says."""

from __future__ import annotations

import pytest

from controlplane.core import fleet_effects as fx
from controlplane.core import fleet_events as events
from controlplane.core.engine_state import Held, Poisoned, Stage
from controlplane.core.errors import EngineMisfit
from controlplane.core.plan import HOST_MEMORY, LinkFate, Load, Plan, RankPlace, Transport
from controlplane.core.versions import DeviceUuid, EngineId, Incarnation, Rank, Term, TrainerId, UpdateId
from tests.support.fleet_core import POLICY, RUN, TTL, Fleet
from tests.support.planned_fleet import ALL, begin, far_engine

LOAD = Load(tensor_count=3, byte_count=1000, chunk_bytes=100, largest_module_bytes=400)


def sender(f: Fleet, sends: frozenset[Transport] = ALL, held: int = 0) -> int:
    f.sessions += 1
    ranks = (RankPlace(Rank(0), "host", DeviceUuid("dev-r0")),)
    hello = events.TrainerConnected(
        f.sessions, RUN, POLICY, TrainerId("t"), Incarnation("t1"), ranks, Term(held), "", False, sends, LOAD
    )
    f.handle(hello)
    return f.sessions


def abort(f: Fleet, update_id: str) -> None:
    f.handle(events.AbortRequested(RUN, UpdateId(update_id), Term(1), "over"))


def transports(plan: Plan) -> dict[str, Transport]:
    return {a.engine.engine_id: a.transport for a in plan.assignments}


def test_a_trainers_transports_and_load_are_known_also_after_it_resumed() -> None:
    f = Fleet()
    sender(f, HOST_MEMORY)
    assert (f.core.trainers[POLICY].transports, f.core.trainers[POLICY].load) == (HOST_MEMORY, LOAD)
    sender(f, ALL, held=1)
    assert f.core.trainers[POLICY].transports == ALL


def test_what_failed_before_is_avoided_for_that_life_only() -> None:
    f = Fleet()
    far_engine(f, "e0")
    sender(f)
    assert transports(begin(f, "u1")) == {"e0": Transport.BROADCAST}
    abort(f, "u1")
    broken = events.Avoided(EngineId("e0"), Incarnation("i1"), Transport.BROADCAST, "no way through")
    plan = begin(f, "u2", avoid=(broken,))
    assert transports(plan) == {"e0": Transport.INLINE}
    assert "no way through" in plan.assignments[0].reason
    abort(f, "u2")
    far_engine(f, "e0", life="i2")
    assert transports(begin(f, "u3", avoid=(broken,))) == {"e0": Transport.BROADCAST}


def test_links_have_the_fate_that_the_settings_give_them() -> None:
    f = Fleet(link_fate=LinkFate.PER_ENGINE)
    far_engine(f, "e0")
    sender(f)
    assert [(a.link, a.fate) for a in begin(f, "u1").assignments] == [("0/e0", LinkFate.PER_ENGINE)]


def test_inv5_a_base_is_given_to_engines_that_report_just_it_and_can_take_a_delta() -> None:
    f = Fleet(link_fate=LinkFate.PER_ENGINE)
    sender(f)
    sessions = {name: far_engine(f, name, "delta") for name in ("good", "other", "poisoned")}
    sessions["unable"] = far_engine(f, "unable")
    update = f.push("u1", sessions)
    base = Held(update.version, b"d")
    f.report(sessions["other"], "other", weights=Held(update.version, b"x"))
    f.report(sessions["poisoned"], "poisoned", weights=Poisoned("boom"))
    plan = begin(f, "u2", base=base)
    assert {a.engine.engine_id for a in plan.assignments if a.base} == {"good"}
    assert plan.assignments[0].base == base
    abort(f, "u2")
    assert [a.base for a in begin(f, "u3").assignments] == [None] * 4


def test_the_plans_revision_grows_with_each_new_life_and_set_of_ranks_and_only_then() -> None:
    f = Fleet()
    seen = [f.core.plan_revision]

    def grew() -> bool:
        seen.append(f.core.plan_revision)
        return seen[-1] > seen[-2]

    session = f.engine("e0")
    assert grew()
    f.trainer()
    assert grew()
    f.report(session, "e0")
    f.engine("e0")
    f.trainer(held=1)
    assert not grew()
    f.trainer(held=1, ranks=(RankPlace(Rank(0), "host", DeviceUuid("another")),))
    assert grew()
    session = f.engine("e0", incarnation="i2")
    assert grew()
    f.handle(events.SessionEnded(session, goodbye=True))
    assert grew()


def test_an_open_update_keeps_its_plan() -> None:
    f = Fleet()
    session = f.engine("e0")
    f.trainer()
    update = f.begin("u1")
    before = update.plan.digest
    f.engine("e1")
    f.stage(session, "e0", update, Stage.READY)
    assert f.core.updates[UpdateId("u1")].plan.digest == before


def test_g4_an_engine_that_does_not_fit_is_refused_also_while_its_trainer_is_cut_off_for_a_moment() -> None:
    f = Fleet()
    session = sender(f)
    f.handle(events.SessionEnded(session, goodbye=False))
    with pytest.raises(EngineMisfit, match=r"e0: 1 of its 2 devices .* missing: dev-9"):
        f.engine("e0", devices=("dev-r0", "dev-9"))
    assert "e0" not in f.core.engines


def test_g4_a_trainer_that_comes_back_is_not_refused_for_an_engine_that_came_meanwhile() -> None:
    f = Fleet()
    session = sender(f)
    f.handle(events.SessionEnded(session, goodbye=False))
    f.pass_time(TTL + 1.0)
    f.engine("e0", devices=("dev-r0", "dev-9"))
    f.engine("good")
    sender(f, held=1)
    sent_away = [x.error for x in f.batches[-1] if isinstance(x, fx.CloseSession)]
    assert [type(error) for error in sent_away] == [EngineMisfit]
    assert [a.engine.engine_id for a in begin(f, "u1").assignments] == ["good"]
