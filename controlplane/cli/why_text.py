"""What an update waits for, or waited for: by what the coordinator knows of each engine and of the trainer.

Pure. One rule for whom it waits for: before go the engines that it needs and that are not ready, after go those that
it needs and that have not ended. Of one that is UNKNOWN nothing is said but for how long (INV-8).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from controlplane.cli.fleet_table import OPEN, lost_ranks, outcome_text, phase_word, version_text
from controlplane.cli.plan_table import size, transport_word
from controlplane.cli.tables import add_row, new_table
from controlplane.cli.updates_table import (
    applied,
    between,
    instant,
    pause_seconds,
    seconds_of,
    seconds_text,
    stage_word,
    update_json,
)
from weightplane.v1 import engine_pb2, fleet_pb2, operator_pb2

ENDED = (engine_pb2.UPDATE_STAGE_APPLIED, engine_pb2.UPDATE_STAGE_ABORTED, engine_pb2.UPDATE_STAGE_FAILED)
READY = (engine_pb2.UPDATE_STAGE_READY, engine_pb2.UPDATE_STAGE_INSTALLING, engine_pb2.UPDATE_STAGE_APPLIED)
SLOWEST_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Wait:
    """Whom an update waits for, and for what."""

    who: str
    what: str
    seconds: float | None
    """Since it came to this stage, or was last heard; None: nobody knows."""

    def __str__(self) -> str:
        since = "" if self.seconds is None else f", for {self.seconds:.1f} s"
        return f"{self.who}: {self.what}{since}"


def waits(view: operator_pb2.FleetView, update: fleet_pb2.UpdateState, now: float) -> list[Wait]:
    """Of an open update; none where it only waits for the coordinator's next look."""
    if update.phase not in OPEN:
        return []
    found = [_engine_wait(view, update, o, now) for o in update.engines if _is_waited_for(update, o)]
    trainer = _trainer_wait(view, update, now)
    return ([trainer] if trainer else []) + found


def _is_waited_for(update: fleet_pb2.UpdateState, outcome: fleet_pb2.EngineOutcome) -> bool:
    if outcome.lost or outcome.stage in ENDED:
        return False
    if update.phase == fleet_pb2.UPDATE_PHASE_GO:
        return outcome.required
    return (outcome.required or outcome.awaited) and outcome.stage not in READY


def _trainer_wait(view: operator_pb2.FleetView, update: fleet_pb2.UpdateState, now: float) -> Wait | None:
    """It sends the bytes and the commit frames; of a rollback the coordinator does."""
    trainer = next((t for t in view.trainers if t.model == update.model), None)
    if trainer is None or update.HasField("restores"):
        return None
    if trainer.connected:
        lost = lost_ranks(trainer)
        return Wait(trainer.trainer_id, f"it lost {lost}, and ends the push", None) if lost else None
    left = seconds_of(trainer.lease_expire_time) - now
    lease = f"its lease ends in {left:.0f} s" if left > 0 else "its lease is over"
    what = "the trainer left" if trainer.left else f"the trainer is not connected; {lease}"
    return Wait(trainer.trainer_id, what, None)


def _engine_wait(
    view: operator_pb2.FleetView, update: fleet_pb2.UpdateState, outcome: fleet_pb2.EngineOutcome, now: float
) -> Wait:
    name = outcome.engine.engine_id
    engine = next((e for e in view.engines if e.status.engine == outcome.engine), None)
    if engine is None:
        return Wait(name, "that life of it is gone", None)
    if not engine.known:
        return Wait(name, "silent, UNKNOWN", now - seconds_of(engine.report_time))
    since = seconds_of(outcome.stage_times[-1].time) if outcome.stage_times else instant(update, "begin_time")
    return Wait(name, _what(view, update, outcome, engine), None if since is None else now - since)


def _what(
    view: operator_pb2.FleetView,
    update: fleet_pb2.UpdateState,
    outcome: fleet_pb2.EngineOutcome,
    engine: operator_pb2.EngineView,
) -> str:
    way = _way(view, update, outcome)
    if outcome.stage == engine_pb2.UPDATE_STAGE_RECEIVING:
        here = size(engine.status.update.bytes_received)
        return f"receiving{way}: {here} of {size(update.byte_count)} are in"
    if outcome.stage == engine_pb2.UPDATE_STAGE_READY:
        return "ready: the commit frame has not come" + way
    if outcome.stage == engine_pb2.UPDATE_STAGE_INSTALLING:
        return f"installing; {engine.status.live_requests} requests are in it"
    return f"nothing has come yet{way}"


def _way(view: operator_pb2.FleetView, update: fleet_pb2.UpdateState, outcome: fleet_pb2.EngineOutcome) -> str:
    """Who sends, and how."""
    assignments = [a for p in view.plans if p.update_id == update.update_id for a in p.plan.assignments]
    mine = next((a for a in assignments if a.engine == outcome.engine), None)
    if mine is None:
        return ""
    who = f"rank {mine.leader}" if mine.ranks else "the coordinator"
    return f" from {who} by {transport_word(mine.transport)}"


def render_why(view: operator_pb2.FleetView, update: fleet_pb2.UpdateState, now: float) -> RenderableType:
    """The whole of `weightplane why`, but for stacks."""
    parts: list[RenderableType] = [Text(_head(update, now))]
    if update.cause:
        parts.append(Text(update.cause, style="bold red"))
    found = waits(view, update, now)
    if found:
        parts += [Text(), Text("waits for", style="bold"), *(Text(f"  {w}") for w in found)]
    elif update.phase in OPEN:
        parts.append(Text("waits for nobody: the coordinator decides at its next look"))
    else:
        parts += [Text(f"  {line}") for line in _spent(update)]
    return Group(*parts, Text(), _engines_table(update))


def _head(update: fleet_pb2.UpdateState, now: float) -> str:
    what = f"update {update.update_id} of {update.model}, version {version_text(update.version)}"
    began, deadline = instant(update, "begin_time"), instant(update, "deadline_time")
    if update.phase not in OPEN:
        took = between(update, "begin_time", "decide_time")
        return f"{what}: {phase_word(update)}" + ("" if took is None else f" after {seconds_text(took)}")
    since = "since before the coordinator's start" if began is None else f"for {now - began:.1f} s"
    until = {fleet_pb2.UPDATE_PHASE_PREPARING: "go", fleet_pb2.UPDATE_PHASE_GO: "be decided"}[update.phase]
    left = "" if deadline is None else f"; it must {until} within {max(0.0, deadline - now):.0f} s"
    return f"{what}: {phase_word(update)} {since}{left}"


def _spent(update: fleet_pb2.UpdateState) -> Iterator[str]:
    """Where the time of a decided update went: who was ready last, who installed longest."""
    to_go, began, went = (
        between(update, "begin_time", "go_time"),
        instant(update, "begin_time"),
        instant(update, "go_time"),
    )
    if began is not None:
        ready = _slowest(update, engine_pb2.UPDATE_STAGE_READY, began)
        yield (
            f"went after {seconds_text(to_go)}; ready last: {ready}"
            if to_go is not None
            else f"never went; ready: {ready}"
        )
    if went is not None:
        yield f"then applied last: {_slowest(update, engine_pb2.UPDATE_STAGE_APPLIED, went)}"
    longest = sorted(((sum(pause_seconds(o).values()), o) for o in update.engines), key=lambda p: -p[0])
    for total, outcome in longest[:1]:
        if total:
            parts = ", ".join(f"{part} {value:.3f} s" for part, value in pause_seconds(outcome).items() if value)
            yield f"longest pause: {outcome.engine.engine_id}, {parts}"


def _slowest(update: fleet_pb2.UpdateState, stage: engine_pb2.UpdateStage.ValueType, start: float) -> str:
    came = [
        (seconds_of(s.time) - start, o.engine.engine_id)
        for o in update.engines
        for s in o.stage_times
        if s.stage == stage
    ]
    shown = sorted(came, reverse=True)[:SLOWEST_SHOWN]
    return ", ".join(f"{name} {seconds:.2f} s" for seconds, name in shown) or "nobody"


def _engines_table(update: fleet_pb2.UpdateState) -> RenderableType:
    table = new_table("ENGINE", "REQUIRED", "OUTCOME", "STAGES", "PAUSE", "WHAT IT SAID")
    began = instant(update, "begin_time")
    for outcome in update.engines:
        required = "yes" if outcome.required else "awaited" if outcome.awaited else "no"
        stages = (
            [] if began is None else [(stage_word(s.stage), seconds_of(s.time) - began) for s in outcome.stage_times]
        )
        pause = sum(v for part, v in pause_seconds(outcome).items() if part != "wait")
        add_row(
            table,
            outcome.engine.engine_id,
            required,
            Text(outcome_text(update, outcome), style="green" if applied(outcome) else ""),
            ", ".join(f"{word} at {at:.2f} s" for word, at in stages),
            seconds_text(pause) if outcome.HasField("timings") else "",
            outcome.error_message,
        )
    return table


def why_json(view: operator_pb2.FleetView, update: fleet_pb2.UpdateState, now: float) -> dict[str, Any]:
    """As `weightplane updates --json`, and whom it waits for. Keys are only ever added."""
    found = [
        {"who": w.who, "what": w.what, "seconds": None if w.seconds is None else round(w.seconds, 3)}
        for w in waits(view, update, now)
    ]
    return {"run_id": view.run_id, "update": update_json(update), "waits_for": found}
