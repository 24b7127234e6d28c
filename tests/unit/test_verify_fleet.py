"""`weightplane verify`: engines' own words against the fleet's record; one difference is enough."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from rich.console import Console

from controlplane.cli.verify_fleet import Said, compare, findings_json, known_digests, render_findings
from tests.support.golden import assert_golden
from tests.support.scripted_fleet import ScriptedFleet, poisoned
from weightplane.v1 import engine_pb2, fleet_pb2, operator_pb2, version_pb2


def asked(view: operator_pb2.FleetView) -> dict[str, Said]:
    """Agents that say just what they reported."""
    said: dict[str, Said] = {}
    for engine in view.engines:
        status = engine_pb2.EngineStatus()
        status.CopyFrom(engine.status)
        said[engine.status.engine.engine_id] = status
    return said


def fleet_of_two() -> operator_pb2.FleetView:
    fleet = ScriptedFleet(2)
    fleet.push(1)
    return fleet.view()


def wrong(change: Callable[[engine_pb2.EngineStatus], None]) -> list[str]:
    """The problems of an engine of two whose agent says something else than it reported."""
    view = fleet_of_two()
    said = asked(view)
    status = said["engine-1"]
    assert isinstance(status, engine_pb2.EngineStatus)
    change(status)
    good, bad = compare(view, said)
    assert good.good
    return list(bad.problems)


def test_engines_that_hold_what_is_served_are_equal() -> None:
    view = fleet_of_two()
    assert all(f.good for f in compare(view, asked(view)))


def test_another_life_is_a_difference() -> None:
    def change(status: engine_pb2.EngineStatus) -> None:
        status.engine.incarnation = "another"

    assert wrong(change) == ["it lives another life than the coordinator knows of"]


def test_other_content_under_the_served_version_is_a_difference() -> None:
    def change(status: engine_pb2.EngineStatus) -> None:
        status.content_digest = b"other"

    (problem,) = wrong(change)
    assert problem.startswith("its content is not that version's")


def test_a_version_that_is_not_served_is_a_difference() -> None:
    def change(status: engine_pb2.EngineStatus) -> None:
        status.applied.number = 7

    assert wrong(change) == ["the fleet does not serve that"]


def test_inv1_unset_is_equal_to_no_version() -> None:
    def change(status: engine_pb2.EngineStatus) -> None:
        status.ClearField("applied")
        status.weights = engine_pb2.WEIGHTS_STATE_UNSET

    assert wrong(change) == ["it holds no version"]


def test_inv8_an_engine_that_does_not_answer_is_unknown_and_so_no_agreement() -> None:
    view = fleet_of_two()
    silent, _ = compare(view, asked(view) | {"engine-0": "no answer at nowhere:1"})
    assert (silent.holds, silent.problems) == ("unknown", ("no answer at nowhere:1",))


def test_a_held_engine_is_compared_with_the_version_that_it_is_held_at() -> None:
    view = fleet_of_two()
    view.engines[1].kept.CopyFrom(version_pb2.WeightVersion(term=1, number=1))
    view.state.models[0].served[0].number = 2
    said = asked(view)
    first, second = compare(view, said)
    assert (first.problems, second.problems) == (("the fleet does not serve that",), ())


def test_what_nobody_knows_the_digest_of_the_engines_must_agree_on() -> None:
    view = fleet_of_two()
    del view.updates[:]
    assert known_digests(view) == {}
    said = asked(view)
    status = said["engine-1"]
    assert isinstance(status, engine_pb2.EngineStatus)
    status.content_digest = b"other"
    assert [f.good for f in compare(view, said)] == [True, False]


def test_a_checkpoint_says_what_a_version_is() -> None:
    view = fleet_of_two()
    del view.updates[:]
    version = view.engines[0].status.applied
    view.checkpoints.append(fleet_pb2.Checkpoint(model="policy", version=version, content_digest=b"as written"))
    assert [f.good for f in compare(view, asked(view))] == [False, False]


def test_findings_read_as_reviewed() -> None:
    view = poisoned()
    findings = compare(view, asked(view) | {"engine-5": "no answer at 10.0.0.15:7071: Connection refused"})
    console = Console(width=200, no_color=True, force_terminal=False, soft_wrap=True)
    with console.capture() as capture:
        console.print(render_findings(findings))
    assert_golden("verify.txt", capture.get())
    assert_golden("verify.json", json.dumps(findings_json(view, findings)["engines"][1:3], indent=2))


@pytest.mark.parametrize("engines", [0, 2])
def test_no_engine_at_all_is_no_agreement(engines: int) -> None:
    view = operator_pb2.FleetView() if not engines else fleet_of_two()
    assert findings_json(view, compare(view, asked(view)))["equal"] == bool(engines)
