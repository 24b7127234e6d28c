"""Dry runs: the plan that an update would get, what would refuse it, and what `weightplane plan` shows of it."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest

from controlplane.cli.plan_table import plan_json, render_plan, size
from controlplane.coordinator import views
from controlplane.core import fleet_events as events
from controlplane.core.engine_state import Hold, HoldKind, Residency
from controlplane.core.errors import FormatMismatch, InvalidRequest
from controlplane.core.fleet_preview import Preview
from controlplane.core.plan import LinkFate, Transport
from controlplane.core.update_policy import UpdatePolicy
from controlplane.core.versions import EngineId, Incarnation, ModelName, Term, UpdateId
from tests.support.fleet_core import POLICY, RUN, TTL, Fleet
from tests.support.golden import assert_golden
from tests.support.planned_fleet import GIB, LOAD, ask, begin, far_engine, trainer
from tests.support.shown_fleet import shown
from weightplane.v1 import operator_pb2


def problems(found: Preview) -> list[str]:
    return [p.reason for p in found.problems]


def mixed_fleet() -> Fleet:
    """A slot of two ranks, an engine beside it, three on another host; one sleeps, one drains, one is silent."""
    f = Fleet()
    f.engine("wide", devices=("dev-0", "dev-1"))
    for name in ("e10", "e2"):
        far_engine(f, name)
    sessions = {n: f.engine(n, devices=(f"own-{n}",)) for n in ("near", "tired", "leaving", "gone")}
    f.report(sessions["tired"], "tired", residency=Residency.ASLEEP)
    f.report(sessions["leaving"], "leaving", holds=frozenset({Hold(HoldKind.DRAINING, "ann")}))
    f.handle(events.SessionEnded(sessions["gone"], goodbye=False))
    f.engine("half", devices=("own-half",), unit="pair", unit_size=2)
    trainer(f)
    return f


def test_a_dry_run_gives_the_plan_that_the_update_then_gets() -> None:
    f = mixed_fleet()
    found = ask(f)
    assert found.plan == begin(f, "u1")
    assert problems(found) == []


def test_a_dry_run_changes_nothing_and_uses_no_number() -> None:
    f = mixed_fleet()
    before = copy.deepcopy(vars(f.core))
    ask(f)
    ask(f, transport=Transport.INLINE, fate=LinkFate.PER_ENGINE)
    assert [name for name, value in vars(f.core).items() if value != before[name]] == []
    assert f.begin("u1").version.number == 1


def test_settings_can_be_tried_without_setting_them() -> None:
    f = mixed_fleet()
    inline = ask(f, transport=Transport.INLINE).plan
    assert {a.transport for a in inline.assignments} == {Transport.INLINE}
    apart = ask(f, fate=LinkFate.PER_ENGINE).plan
    assert {a.link for a in apart.assignments if a.link} == {"1/e2", "2/e10"}
    assert ask(f).plan == begin(f, "u1")


def test_what_failed_before_is_avoided_in_the_dry_run_too() -> None:
    f = mixed_fleet()
    broken = events.Avoided(EngineId("e2"), Incarnation("i1"), Transport.BROADCAST, "no way through")
    begin(f, "u1", avoid=(broken,))
    f.handle(events.AbortRequested(RUN, UpdateId("u1"), Term(1), "over"))
    chosen = {str(a.engine.engine_id): a for a in ask(f).plan.assignments}
    assert chosen["e2"].transport is Transport.INLINE
    assert "no way through" in chosen["e2"].reason
    assert chosen["e10"].transport is Transport.BROADCAST


def test_who_takes_no_part_is_named_with_the_reason() -> None:
    assert ask(mixed_fleet()).left_out == (
        ("gone", "silent: UNKNOWN"),
        ("leaving", "draining, asked by ann"),
        ("tired", "asleep"),
    )


def test_what_would_refuse_the_update_is_named_beside_the_plan() -> None:
    f = Fleet(policy=UpdatePolicy(min_engines={"decode": 2}))
    trainer(f)
    assert problems(ask(f)) == ["NO_ENGINES"]
    f.engine("e0", group="decode")
    found = ask(f)
    assert (problems(found), len(found.plan.assignments)) == (["NOT_ENOUGH_ENGINES"], 1)
    f.engine("e1", group="decode")
    begin(f, "u1")
    found = ask(f)
    assert (problems(found), len(found.plan.assignments)) == (["UPDATE_IN_PROGRESS"], 2)


def test_an_engine_of_another_format_is_named_in_the_dry_run_and_refuses_the_update_before_its_number() -> None:
    f = Fleet()
    for name, takes in (("e0", "format:fp8-block"), ("e1", "format:plain"), ("e2", "staged")):
        f.engine(name)
        f.core.engines[EngineId(name)].capabilities = (takes,)
    trainer(f, replace(LOAD, weights_format="plain"))
    assert [str(p) for p in ask(f).problems] == [
        "the engine's weights are in format fp8-block (e0), the layout is in plain"
    ]
    before = f.core.next_number
    with pytest.raises(FormatMismatch, match="e0"):
        f.begin("u1")
    assert f.core.next_number == before
    f.core.trainers[POLICY].load = LOAD  # it does not say: the engine's own check is left
    assert ask(f).problems == ()


def test_after_a_restart_it_is_said_what_is_not_known_yet() -> None:
    f = mixed_fleet()
    g = Fleet(f.ledger)
    found = ask(g)
    assert problems(found) == ["COORDINATOR_RECOVERING", "NO_ENGINES", "COORDINATOR_RECOVERING"]
    assert found.plan.assignments == ()
    assert found.notes == ("trainer t0 is not connected: the plan is from what it said last",)


def test_g4_an_engine_that_came_while_its_trainer_was_away_and_does_not_fit_is_named_with_numbers() -> None:
    f = Fleet()
    session = trainer(f)
    f.engine("good", devices=("dev-2",))
    f.handle(events.SessionEnded(session, goodbye=False))
    f.now += TTL + 1.0
    f.engine("misfit", devices=("dev-0", "dev-1", "dev-10", "dev-9"))
    found = ask(f)
    assert problems(found) == []
    assert [a.engine.engine_id for a in found.plan.assignments] == ["good"]
    text = "misfit: 2 of its 4 devices are held by trainer ranks; missing: dev-9, dev-10"
    assert found.left_out == (("misfit", text),)


@pytest.mark.parametrize("model", ["", "critic"])
def test_without_a_trainer_there_is_no_plan(model: str) -> None:
    with pytest.raises(InvalidRequest, match="no trainer"):
        ask(Fleet(), model)


def test_of_several_models_one_has_to_be_named() -> None:
    f = Fleet()
    trainer(f)
    trainer(f, model=ModelName("critic"))
    with pytest.raises(InvalidRequest, match="name one of those with a trainer: critic, policy"):
        ask(f)
    assert ask(f, "critic").model == "critic"


def test_a_checkpoint_is_nothing_that_a_trainer_could_be_asked_to_send() -> None:
    f = mixed_fleet()
    with pytest.raises(InvalidRequest, match="no rank sends a checkpoint"):
        ask(f, transport=Transport.CHECKPOINT)


# ---- what people see ----


def answer(f: Fleet) -> operator_pb2.PlanResponse:
    return views.preview(ask(f), RUN)


def test_a_plan_reads_as_reviewed() -> None:
    assert_golden("plan.txt", shown(render_plan(answer(mixed_fleet()))))


def test_a_plan_as_json_is_as_reviewed() -> None:
    assert_golden("plan.json", json.dumps(plan_json(answer(mixed_fleet())), indent=2))


def test_a_plan_that_would_be_refused_reads_as_reviewed() -> None:
    f = Fleet(policy=UpdatePolicy(min_engines={"decode": 2}))
    f.engine("e0", group="decode")
    trainer(f, load=None)
    refused = shown(render_plan(answer(f)))
    f = Fleet()
    trainer(f)
    assert_golden("plan-refused.txt", f"{refused}\n\n{shown(render_plan(answer(f)))}")


def test_sizes_are_shown_in_the_largest_unit_that_they_fill() -> None:
    assert [size(n) for n in (0, 1023, 1024, 1_500_000, 3 * GIB, 5 * 2**40)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.4 MiB",
        "3.0 GiB",
        "5.0 TiB",
    ]
