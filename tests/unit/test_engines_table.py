"""What `weightplane engines` and `weightplane rollback` show."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from rich.console import Console, RenderableType

from controlplane.cli.engines_table import engines_json, render_engines
from controlplane.cli.fleet_table import render_fleet, since
from controlplane.cli.rollback_table import changes, render_outcomes, verdict
from controlplane.cli.updates_table import render_updates
from tests.support.golden import assert_golden
from tests.support.shown_fleet import NOW, at, engine, outcome, shown, version, whole_fleet
from weightplane.v1 import engine_pb2, fleet_pb2, operator_pb2

TRUE, FALSE = engine_pb2.CONDITION_STATUS_TRUE, engine_pb2.CONDITION_STATUS_FALSE
UNKNOWN = engine_pb2.CONDITION_STATUS_UNKNOWN


def condition(
    kind: str, status: engine_pb2.ConditionStatus.ValueType, reason: str, seconds: float, message: str = ""
) -> engine_pb2.Condition:
    return engine_pb2.Condition(
        type=kind, status=status, reason=reason, message=message, last_transition_time=at(-seconds)
    )


def engines() -> operator_pb2.FleetView:
    refused = engine_pb2.Refusal(
        version=version(2, 8), reason="SHAPE_MISMATCH", message="head: the engine expects shape (3,)", time=at(-400)
    )
    serving = engine("engine-0", "serving", applied=version(2, 7), gate_open=True, refused=refused)
    serving.group, serving.unit = "decode", "pair-0"
    serving.capabilities.extend(["processed_logprobs", "staged"])
    serving.desired.CopyFrom(version(2, 7))
    serving.conditions.extend(
        [
            condition("Running", TRUE, "Running", 100_000),
            condition("WeightsHeld", TRUE, "Applied", 42, "version 2.7"),
            condition("Updating", FALSE, "Idle", 40),
        ]
    )
    behind = engine("engine-1", "receiving")
    behind.desired.CopyFrom(version(2, 7))
    behind.catch_up = "catch-up-3-1"
    behind.conditions.append(condition("WeightsHeld", FALSE, "Unset", 7300))
    behind.kept.CopyFrom(version(2, 6))
    lost = engine("engine-2", "serving", applied=version(2, 7), known=False, refused=refused)
    lost.desired.CopyFrom(version(2, 7))
    lost.conditions.append(condition("Running", UNKNOWN, "Silent", 200_000, "last heard: Running"))
    for each in (serving, lost):
        each.capabilities.extend(["checkpoint", "format:plain", "staged"])
    behind.capabilities.extend(["format:plain", "staged"])
    return operator_pb2.FleetView(run_id="run-a", coordinator_term=3, engines=[serving, behind, lost])


def unheld() -> operator_pb2.FleetView:
    view = whole_fleet()
    for each in view.engines:
        del each.status.holds[:]
    return view


@pytest.mark.parametrize(
    ("table", "headings"),
    [
        (lambda: render_fleet(unheld(), NOW), "ENGINE STATE APPLIED SERVED GATE LIVE WAITING ENDPOINT SEEN"),
        (lambda: render_engines(unheld(), NOW), "ENGINE STATE APPLIED DESIRED"),
        (lambda: render_updates(unheld(), 5, NOW), "UPDATE MODEL VERSION STEP PHASE BEGAN GO DECISION APPLIED"),
    ],
)
def test_at_80_columns_a_table_fits_and_every_heading_is_whole(
    table: Callable[[], RenderableType], headings: str
) -> None:
    lines = shown(table(), 80).splitlines()
    assert set(headings.split()) <= {word for line in lines for word in line.split()}
    assert max(map(len, lines)) <= 80


def test_engines_read_as_reviewed() -> None:
    assert_golden("engines.txt", shown(render_engines(engines(), NOW)))


def test_the_json_of_engines_is_stable() -> None:
    assert_golden("engines.json", json.dumps(engines_json(engines()), indent=2))


def test_a_fleet_without_engines_says_so() -> None:
    assert shown(render_engines(operator_pb2.FleetView(), NOW)) == "no engine is known\n"
    assert engines_json(operator_pb2.FleetView())["engines"] == []


def test_inv_8_the_last_words_of_a_lost_engine_are_shown_nowhere() -> None:
    lost = next(line for line in shown(render_engines(engines(), NOW)).splitlines() if line.startswith("engine-2"))
    assert lost.split() == ["engine-2", "UNKNOWN", "UNKNOWN", "2.7"]
    said = engines_json(engines())["engines"][2]
    assert (said["state"], said["applied"], said["refused"]) == ("UNKNOWN", None, None)


def changed_cells(*counts: int) -> list[str]:
    """The column CHANGED as a terminal gets it, colours and all."""
    view = engines()
    for each, count in zip(view.engines, counts, strict=False):
        each.status.update.MergeFrom(engine_pb2.UpdateProgress(changed_tensors=count, tensor_count=34))
    console = Console(width=200, force_terminal=True, color_system="standard", _environ={})
    with console.capture() as capture:
        console.print(render_engines(view, NOW))
    return re.findall(r"\S*\d+ of 34\S*", capture.get())


def test_an_update_that_changed_nothing_is_yellow() -> None:
    nothing, some = changed_cells(0, 3)
    assert nothing.startswith("\x1b[1;33m0 of 34"), "bold yellow: perhaps the wrong model was pushed"
    assert some == "3 of 34"


def test_inv_8_what_a_lost_engines_last_update_changed_is_not_shown() -> None:
    assert len(changed_cells(0, 0, 0)) == 2


def test_times_are_in_one_unit_that_suits_them() -> None:
    assert [since(s) for s in (-1, 0, 119, 120, 7199, 7200, 172_799, 172_800)] == [
        *("0 s", "0 s", "119 s", "2 min", "119 min", "2 h", "47 h", "2 d"),
    ]


# ---- rollback ----


def rollback(phase: fleet_pb2.UpdatePhase.ValueType, *engines: fleet_pb2.EngineOutcome) -> fleet_pb2.UpdateState:
    return fleet_pb2.UpdateState(
        update_id="u",
        version=version(2, 8),
        restores=version(1, 3),
        phase=phase,
        engines=engines,
        cause="engine-1 failed (CHECKPOINT_UNREADABLE: no such file)",
    )


APPLIED, READY = engine_pb2.UPDATE_STAGE_APPLIED, engine_pb2.UPDATE_STAGE_READY
BROKEN = outcome(
    "engine-1",
    engine_pb2.UPDATE_STAGE_ABORTED,
    required=True,
    error_reason="CHECKPOINT_UNREADABLE",
    error_message="checkpoint a cannot be read here: no such file",
)


def test_only_what_changed_is_told() -> None:
    before = rollback(fleet_pb2.UPDATE_PHASE_PREPARING, outcome("engine-0", READY), outcome("engine-1", 0))
    after = rollback(fleet_pb2.UPDATE_PHASE_GO, outcome("engine-0", READY), BROKEN)
    assert list(changes(fleet_pb2.UpdateState(), before)) == ["engine-0 ready"]
    assert list(changes(before, after)) == [
        "go: every engine that it needs is ready",
        "engine-1 aborted (CHECKPOINT_UNREADABLE)",
    ]
    assert list(changes(after, after)) == []


def test_the_outcomes_and_the_verdict_read_as_reviewed() -> None:
    texts = []
    for phase in ("COMMITTED", "DEGRADED", "FAILED"):
        state = rollback(
            fleet_pb2.UpdatePhase.Value(f"UPDATE_PHASE_{phase}"), outcome("engine-0", APPLIED, required=True), BROKEN
        )
        texts.append(shown(render_outcomes(state)) + verdict(state))
    assert_golden("rollback.txt", "\n\n".join(texts))
