"""What `weightplane updates`, `why` and `watch` show."""

from __future__ import annotations

import json

import pytest

from controlplane.cli.ending import CommandFailed
from controlplane.cli.updates import find
from controlplane.cli.updates_table import render_updates, seconds_of, updates_json
from controlplane.cli.watch_screen import event_line, fresh, render_watch
from controlplane.cli.why_text import render_why, waits, why_json
from controlplane.core import fleet_events as events
from controlplane.core.engine_state import Stage
from controlplane.core.fleet_records import LostRank
from controlplane.core.versions import Term
from tests.support.golden import assert_golden
from tests.support.scripted_fleet import ScriptedFleet, poisoned, two_hundred, updating
from tests.support.shown_fleet import shown
from weightplane.v1 import fleet_pb2, operator_pb2

View = operator_pb2.FleetView

WIDE = 200


def why(view: View, update: str = "latest") -> str:
    return shown(render_why(view, find(view, update), seconds_of(view.time)), WIDE)


def test_updates_read_as_reviewed() -> None:
    view = poisoned()
    assert_golden("updates.txt", shown(render_updates(view, 4, seconds_of(view.time)), WIDE))


def test_updates_as_json_stay_as_reviewed() -> None:
    assert_golden("updates.json", json.dumps(updates_json(poisoned(), 1), indent=2))


def test_why_an_open_update_is_not_decided_reads_as_reviewed() -> None:
    assert_golden("why-go.txt", why(updating()))


def test_why_an_update_does_not_go_names_whose_bytes_are_missing_and_who_is_silent() -> None:
    fleet = ScriptedFleet(4)
    fleet.push(1)
    update = fleet.begin(2)
    fleet.stage("engine-0", update, Stage.READY)
    fleet.stage("engine-1", update, Stage.RECEIVING, received=3 * 2**30)
    fleet.lose("engine-3")
    fleet.wait(4.0)
    fleet.lose("trainer")
    assert_golden("why-preparing.txt", why(fleet.view()))


def test_why_a_decided_update_took_so_long_reads_as_reviewed() -> None:
    assert_golden("why-decided.txt", why(poisoned()))


def test_why_as_json_stays_as_reviewed() -> None:
    view = updating()
    found = why_json(view, find(view, "1.6"), seconds_of(view.time))
    assert_golden("why.json", json.dumps({k: v for k, v in found.items() if k != "update"}, indent=2))


def test_inv8_of_a_silent_engine_nothing_is_said_but_its_silence() -> None:
    fleet = ScriptedFleet(2)
    update = fleet.begin(1)
    fleet.stage("engine-1", update, Stage.RECEIVING, received=123)
    fleet.wait(1.0)
    fleet.lose("engine-1")
    view = fleet.view()
    (said,) = [w for w in waits(view, view.updates[0], seconds_of(view.time)) if w.who == "engine-1"]
    assert (said.what, said.seconds) == ("silent, UNKNOWN", 0.0)


def test_an_open_update_whose_trainer_lost_a_rank_says_which() -> None:
    fleet = ScriptedFleet(1)
    fleet.begin(1)
    lost = (LostRank(1, "process 71 ended"),)
    fleet.handle(events.TrainerReported(fleet.sessions["trainer"], Term(1), 1, "push", 1, lost=lost))
    view = fleet.view()
    trainer, _ = waits(view, view.updates[0], seconds_of(view.time))
    assert str(trainer) == "trainer: it lost rank 1 (process 71 ended), and ends the push"


def test_a_decided_update_waits_for_nobody() -> None:
    view = poisoned()
    assert [waits(view, u, seconds_of(view.time)) for u in view.updates] == [[]] * len(view.updates)


@pytest.mark.parametrize("wanted", ["latest", "6", "1.6", "b54cda26", "b54cda26000000000000000000000006"])
def test_an_update_is_named_in_any_of_these_ways(wanted: str) -> None:
    assert find(updating(), wanted).version.number == 6


@pytest.mark.parametrize(("wanted", "said"), [("none", "no update none is known"), ("ab", "ab is several: ab1, ab2")])
def test_a_name_that_is_none_or_several_is_refused(wanted: str, said: str) -> None:
    view = View(updates=[fleet_pb2.UpdateState(update_id=f"ab{i}") for i in (1, 2)])
    with pytest.raises(CommandFailed, match=said):
        find(view, wanted)


def test_a_fleet_without_updates_has_no_latest_one() -> None:
    with pytest.raises(CommandFailed, match="no update is known"):
        find(View(), "latest")


def test_the_screen_of_a_small_fleet_reads_as_reviewed() -> None:
    view = poisoned()
    screen = shown(render_watch(view, seconds_of(view.time), 50), 150)
    assert_golden("watch.txt", "\n".join(line for line in screen.splitlines() if ":02:" not in line))


def test_a_large_fleet_fits_the_screen_and_those_that_do_not_serve_stand_first() -> None:
    view = two_hundred()
    lines = shown(render_watch(view, seconds_of(view.time), 40), 220).splitlines()
    assert len(lines) <= 40
    engines = [line for line in lines if line.startswith("engine-")]
    assert all("serving" not in line for line in engines[:5])
    assert any(line.startswith("and ") and "serving" in line for line in lines)


def test_a_coordinator_that_is_gone_is_said_above_what_it_said_last() -> None:
    view = updating()
    lines = shown(render_watch(view, seconds_of(view.time), 50, "nobody answers"), WIDE).splitlines()
    assert lines[0] == "nobody answers; this is what it said last"


def test_events_come_once_and_in_the_order_in_which_they_happened() -> None:
    fleet = ScriptedFleet(2)
    before = fleet.view()
    assert fresh(None, before)[0].name in ("engine_joined", "term_given")
    fleet.push(1)
    after = fleet.view()
    names = [e.name for e in fresh(before, after)]
    assert names == ["model_served", "update_decided", "engine_state", "engine_state"]
    assert fresh(after, fleet.view()) == []
    assert event_line(after.events[0]).startswith("2026-01-05T14:02:0")


def test_a_coordinators_next_life_begins_its_events_anew() -> None:
    old, new = ScriptedFleet(2).view(), ScriptedFleet(1).view()
    new.coordinator_term = 2
    assert len(fresh(old, new)) == len(new.events)
