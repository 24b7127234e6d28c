"""Engines one by one: what each holds, what it is to hold and what it would not take; and what is true of it.

An engine whose session is lost is UNKNOWN, whatever it said last (INV-8). Pure: takes the view and the time, gives
something that rich can print, or something that is JSON and stays so: keys are only ever added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Group, RenderableType
from rich.text import Text

from controlplane.cli.fleet_table import STYLES, UNKNOWN, applied_word, since, state_word, version_text
from controlplane.cli.tables import add_row, new_table, table_of
from controlplane.rpc.enum_words import word_of
from weightplane.v1 import engine_pb2, operator_pb2, version_pb2

_WORDS = {
    engine_pb2.CONDITION_STATUS_TRUE: "True",
    engine_pb2.CONDITION_STATUS_FALSE: "False",
    engine_pb2.CONDITION_STATUS_UNKNOWN: "Unknown",
}


def render_engines(view: operator_pb2.FleetView, now: float) -> RenderableType:
    """The whole of `weightplane engines`. `now` is the wall clock's time in seconds."""
    if not view.engines:
        return Text("no engine is known")
    refusals = [_refusal_line(e, now) for e in view.engines if _refused(e)]
    parts = [_versions_table(view.engines), Text(), _conditions_table(view.engines, now), *_able_lines(view.engines)]
    return Group(*parts, *([Text(), *refusals] if refusals else []))


def engines_json(view: operator_pb2.FleetView) -> dict[str, Any]:
    """Versions are `term.number`, times RFC 3339; null where there is none."""
    return {
        "run_id": view.run_id,
        "coordinator_term": view.coordinator_term,
        "engines": [_engine_json(e) for e in view.engines],
    }


def _versions_table(engines: Sequence[operator_pb2.EngineView]) -> RenderableType:
    always = ("ENGINE", "STATE", "APPLIED", "DESIRED")
    where_said = ("VERIFIED", "CHANGED", "REFUSED", "GROUP", "UNIT", "FROM CHECKPOINT", "KEPT AT")
    return table_of((*always, *where_said), map(_versions_row, engines), where_said)


def _versions_row(engine: operator_pb2.EngineView) -> list[str | Text]:
    word, refused = state_word(engine), engine.status.refused
    return [
        engine.status.engine.engine_id,
        Text(word, style=STYLES.get(word, "")),
        applied_word(engine),
        version_text(engine.desired) if engine.HasField("desired") else "nothing yet",
        verification_word(engine) or "",
        _changed(engine),
        f"{version_text(refused.version)} ({refused.reason})" if _refused(engine) else "",
        engine.group,
        engine.unit,
        engine.catch_up,
        version_text(engine.kept) if engine.HasField("kept") else "",
    ]


def _changed(engine: operator_pb2.EngineView) -> Text:
    """Tensors that its last update changed, of how many; none at all is suspicious."""
    update = engine.status.update
    if not engine.known or not update.HasField("changed_tensors"):
        return Text()
    return Text(
        f"{update.changed_tensors} of {update.tensor_count}", style="" if update.changed_tensors else "bold yellow"
    )


def _conditions_table(engines: Sequence[operator_pb2.EngineView], now: float) -> RenderableType:
    table = new_table("ENGINE", "CONDITION", "STATUS", "REASON", "SINCE", "MESSAGE")
    for engine in engines:
        for i, condition in enumerate(engine.conditions):
            status = _WORDS.get(condition.status, "Unknown")
            add_row(
                table,
                engine.status.engine.engine_id if i == 0 else "",
                condition.type,
                Text(status, style="bold red" if status == "Unknown" else ""),
                condition.reason,
                since(now - condition.last_transition_time.ToMilliseconds() / 1000),
                condition.message,
            )
    return table


def _able_lines(engines: Sequence[operator_pb2.EngineView]) -> list[Text]:
    """What engines can do; those that can do the same share a line."""
    able: dict[str, list[str]] = {}
    for engine in engines:
        able.setdefault(", ".join(engine.capabilities), []).append(engine.status.engine.engine_id)
    lines = [Text(f"{', '.join(names)} can: {what}") for what, names in able.items() if what]
    return [Text(), *lines] if lines else []


def _refusal_line(engine: operator_pb2.EngineView, now: float) -> Text:
    refused = engine.status.refused
    age = since(now - refused.time.ToMilliseconds() / 1000)
    name, version = engine.status.engine.engine_id, version_text(refused.version)
    return Text(f"{name} refused {version} {age} ago: {refused.reason}: {refused.message}")


def _refused(engine: operator_pb2.EngineView) -> bool:
    return engine.known and engine.status.HasField("refused")


def _engine_json(engine: operator_pb2.EngineView) -> dict[str, Any]:
    status, known = engine.status, engine.known
    return {
        "engine": status.engine.engine_id,
        "incarnation": status.engine.incarnation,
        "model": status.model,
        "group": engine.group,
        "unit": engine.unit,
        "endpoint": engine.endpoint,
        "known": known,
        "routable": engine.routable,
        "state": status.word if known else UNKNOWN,
        "applied": _version(status.applied) if known and status.HasField("applied") else None,
        "desired": _version(engine.desired) if engine.HasField("desired") else None,
        "lag": engine.lag if engine.HasField("lag") else None,
        "tokens_by_lag": list(status.tokens_by_lag) if known else [],
        "likeness": engine.likeness or None,
        "refused": _refusal_json(status.refused) if _refused(engine) else None,
        "verification": verification_word(engine),
        "update": _update_json(status.update) if known and status.HasField("update") else None,
        "catch_up": engine.catch_up or None,
        "capabilities": list(engine.capabilities),
        "held_at": _version(engine.kept) if engine.HasField("kept") else None,
        "report_time": _time(engine.report_time),
        "conditions": [
            {
                "type": c.type,
                "status": _WORDS.get(c.status, "Unknown"),
                "reason": c.reason,
                "message": c.message,
                "last_transition_time": _time(c.last_transition_time),
            }
            for c in engine.conditions
        ],
    }


def _refusal_json(refused: engine_pb2.Refusal) -> dict[str, Any]:
    return {
        "version": _version(refused.version),
        "reason": refused.reason,
        "message": refused.message,
        "time": _time(refused.time),
    }


def verification_word(engine: operator_pb2.EngineView) -> str | None:
    """By what its weights were found right; None where it was brought none, or nobody knows what it holds."""
    if not engine.known or not engine.status.HasField("canary"):
        return None
    return word_of(engine_pb2.Verification, engine.verification)


def _update_json(update: engine_pb2.UpdateProgress) -> dict[str, Any]:
    """`pause_seconds`: how long generation stood still, by part; once applied."""
    return {
        "update_id": update.update_id,
        "version": _version(update.version),
        "stage": word_of(engine_pb2.UpdateStage, update.stage),
        "changed_tensors": update.changed_tensors if update.HasField("changed_tensors") else None,
        "tensor_count": update.tensor_count,
        "pause_seconds": {
            part: getattr(update.timings, part).ToNanoseconds() / 1e9
            for part in ("quiesce", "install", "caches", "canary", "wait")
        }
        if update.HasField("timings")
        else None,
    }


def _version(version: version_pb2.WeightVersion) -> str:
    return version_text(version)


def _time(stamp: Timestamp) -> str:
    return stamp.ToJsonString()
