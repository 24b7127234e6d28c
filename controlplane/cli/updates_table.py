"""Updates one by one: when each began, went and was decided, what it carried, and what became of it.

Pure: takes the view and the time, gives something that rich can print, or something that is JSON and stays so: keys are
only ever added.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Group, RenderableType
from rich.text import Text

from controlplane.cli.fleet_table import (
    ID_SHOWN,
    PHASE_STYLES,
    ago,
    cause_lines,
    outcome_text,
    phase_word,
    version_text,
)
from controlplane.cli.plan_table import size
from controlplane.cli.tables import add_row, new_table
from controlplane.rpc.enum_words import word_of
from weightplane.v1 import engine_pb2, fleet_pb2, operator_pb2

PAUSE_PARTS = ("wait", "quiesce", "install", "caches", "canary")


def render_updates(view: operator_pb2.FleetView, limit: int, now: float) -> RenderableType:
    """The whole of `weightplane updates`. `now` is the coordinator's clock in seconds."""
    if not view.updates:
        return Text("no update is known")
    shown = view.updates[:limit]
    columns = ("UPDATE", "MODEL", "VERSION", "STEP", "PHASE", "BEGAN", "TO GO", "TO DECISION", "SIZE", "APPLIED")
    table = new_table(*columns)
    for update in shown:
        phase = phase_word(update)
        began = instant(update, "begin_time")
        add_row(
            table,
            update.update_id[:ID_SHOWN],
            update.model,
            version_text(update.version)
            + (f" restores {version_text(update.restores)}" if is_rollback(update) else ""),
            str(update.step) if update.HasField("step") else "",
            Text(phase, style=PHASE_STYLES.get(phase, "cyan")),
            "before the coordinator's start" if began is None else ago(now - began),
            seconds_text(between(update, "begin_time", "go_time")),
            seconds_text(between(update, "begin_time", "decide_time")),
            size(update.byte_count) if update.byte_count else "",
            f"{sum(map(applied, update.engines))} of {len(update.engines)}",
        )
    return Group(table, *cause_lines(shown))


def updates_json(view: operator_pb2.FleetView, limit: int) -> dict[str, Any]:
    """Versions are `term.number`, times RFC 3339, durations seconds; null where there is none."""
    return {"run_id": view.run_id, "updates": [update_json(u) for u in view.updates[:limit]]}


def update_json(update: fleet_pb2.UpdateState) -> dict[str, Any]:
    return {
        "update_id": update.update_id,
        "model": update.model,
        "version": version_text(update.version),
        "restores": version_text(update.restores) if is_rollback(update) else None,
        "step": update.step if update.HasField("step") else None,
        "phase": phase_word(update),
        "cause": update.cause,
        "byte_count": update.byte_count,
        "begin_time": _time(update, "begin_time"),
        "go_time": _time(update, "go_time"),
        "decide_time": _time(update, "decide_time"),
        "deadline_time": _time(update, "deadline_time"),
        "seconds_to_go": between(update, "begin_time", "go_time"),
        "seconds_to_decision": between(update, "begin_time", "decide_time"),
        "engines": [_outcome_json(update, o) for o in update.engines],
    }


def _outcome_json(update: fleet_pb2.UpdateState, outcome: fleet_pb2.EngineOutcome) -> dict[str, Any]:
    return {
        "engine": outcome.engine.engine_id,
        "required": outcome.required,
        "outcome": outcome_text(update, outcome),
        "error_reason": outcome.error_reason or None,
        "error_message": outcome.error_message or None,
        "stage_times": {stage_word(s.stage): s.time.ToJsonString() for s in outcome.stage_times},
        "pause_seconds": pause_seconds(outcome) or None,
    }


def pause_seconds(outcome: fleet_pb2.EngineOutcome) -> dict[str, float]:
    """How long its install took, by part; empty before it applied."""
    if not outcome.HasField("timings"):
        return {}
    return {part: getattr(outcome.timings, part).ToNanoseconds() / 1e9 for part in PAUSE_PARTS}


def stage_word(stage: engine_pb2.UpdateStage.ValueType) -> str:
    return word_of(engine_pb2.UpdateStage, stage)


def applied(outcome: fleet_pb2.EngineOutcome) -> bool:
    return outcome.stage == engine_pb2.UPDATE_STAGE_APPLIED and not outcome.lost


def is_rollback(update: fleet_pb2.UpdateState) -> bool:
    return update.HasField("restores")


def instant(update: fleet_pb2.UpdateState, field: str) -> float | None:
    """Seconds since the epoch; None where it has not come, or was before the coordinator's start."""
    return seconds_of(getattr(update, field)) if update.HasField(field) else None  # type: ignore[arg-type]


def seconds_of(stamp: Timestamp) -> float:
    return stamp.ToNanoseconds() / 1e9


def between(update: fleet_pb2.UpdateState, first: str, last: str) -> float | None:
    """Seconds; None where one of them has not come."""
    began, ended = instant(update, first), instant(update, last)
    return None if began is None or ended is None else round(ended - began, 3)


def seconds_text(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def _time(update: fleet_pb2.UpdateState, field: str) -> str | None:
    return getattr(update, field).ToJsonString() if update.HasField(field) else None  # type: ignore[arg-type]
