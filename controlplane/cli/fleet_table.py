"""The fleet as a table: what the coordinator knows, in the words of the contract.

An engine whose session is lost is UNKNOWN, whatever it said last (INV-8): its last words are shown in no column.
Pure: takes the view and the time, gives something that rich can print.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from weightplane.v1 import engine_pb2, fleet_pb2, operator_pb2, version_pb2

UPDATES_SHOWN = 5
UNKNOWN = "UNKNOWN"
_STYLES = {
    "serving": "green",
    "ready": "green",
    "receiving": "cyan",
    "installing": "yellow",
    "held": "yellow",
    "starting": "yellow",
    "stopping": "yellow",
    "empty": "yellow",
    "poisoned": "bold red",
    "dead": "red",
    UNKNOWN: "bold red",
}
_PHASE_STYLES = {"committed": "green", "degraded": "yellow", "failed": "red"}


def render_fleet(view: operator_pb2.FleetView, now: float) -> RenderableType:
    """The whole of `weightplane status`. `now` is the wall clock's time in seconds."""
    parts: list[RenderableType] = [_head(view), Text(), engines_table(view, now)]
    if view.trainers:
        parts += [Text(), _trainers_table(view.trainers, now)]
    if view.updates:
        parts += [Text(), _updates_table(view.updates)]
    return Group(*parts)


def engines_table(view: operator_pb2.FleetView, now: float) -> Table:
    """One line for each engine."""
    table = _table("ENGINE", "STATE", "APPLIED", "SERVED", "GATE", "HOLDS", "LIVE", "WAITING", "ENDPOINT", "SEEN")
    for engine in view.engines:
        served = ", ".join(version_text(v) for v in served_versions(view, engine.status.model)) or "none"
        seen = _ago(now - engine.report_time.ToMilliseconds() / 1000)
        word = state_word(engine)
        state = Text(word, style=_STYLES.get(word, ""))
        name = engine.status.engine.engine_id
        if not engine.known:
            _row(table, name, state, UNKNOWN, served, UNKNOWN, "", "", "", engine.endpoint, seen)
            continue
        status = engine.status
        _row(
            table,
            name,
            state,
            applied_word(engine),
            served,
            "open" if status.gate_open else "shut",
            _holds(status.holds),
            str(status.live_requests),
            str(status.waiting_requests),
            engine.endpoint,
            seen,
        )
    return table


def state_word(engine: operator_pb2.EngineView) -> str:
    """The engine's one word; UNKNOWN while its session is lost."""
    return engine.status.word if engine.known else UNKNOWN


def applied_word(engine: operator_pb2.EngineView) -> str:
    """The version that it holds, `unset`, or UNKNOWN while its session is lost."""
    if not engine.known:
        return UNKNOWN
    return version_text(engine.status.applied) if engine.status.HasField("applied") else "unset"


def version_text(version: version_pb2.WeightVersion) -> str:
    """term.number, as versions are written everywhere."""
    return f"{version.term}.{version.number}"


def served_versions(view: operator_pb2.FleetView, model: str) -> list[version_pb2.WeightVersion]:
    return [v for m in view.state.models if m.model == model for v in m.served]


def _head(view: operator_pb2.FleetView) -> Text:
    models = "; ".join(_model(m) for m in view.state.models) or "no model yet"
    recovering = " · RECOVERING, waiting for agents' reports" if view.recovering else ""
    return Text(f"run {view.run_id} · coordinator term {view.coordinator_term}{recovering} · {models}")


def _model(state: fleet_pb2.ModelState) -> str:
    served = " and ".join(version_text(v) for v in state.served) or "nothing yet"
    return f"{state.model} serves {served} (term {state.term}, commit {state.ordinal})"


def _trainers_table(trainers: Iterable[operator_pb2.TrainerView], now: float) -> Table:
    table = _table("TRAINER", "MODEL", "TERM", "RANKS", "STEP", "PHASE", "LEASE")
    for trainer in trainers:
        status = trainer.status
        _row(
            table,
            trainer.trainer_id,
            trainer.model,
            str(trainer.term),
            str(trainer.rank_count),
            str(status.step) if trainer.connected and status.HasField("step") else "",
            Text(status.phase) if trainer.connected else Text("not connected", style="red"),
            _lease(trainer.lease_expire_time.ToMilliseconds() / 1000 - now),
        )
    return table


def _updates_table(updates: Iterable[fleet_pb2.UpdateState]) -> Table:
    table = _table("UPDATE", "MODEL", "VERSION", "STEP", "PHASE", "ENGINES", "CAUSE")
    for update in list(updates)[:UPDATES_SHOWN]:
        phase = fleet_pb2.UpdatePhase.Name(update.phase).removeprefix("UPDATE_PHASE_").lower()
        _row(
            table,
            update.update_id,
            update.model,
            version_text(update.version),
            str(update.step) if update.HasField("step") else "",
            Text(phase, style=_PHASE_STYLES.get(phase, "")),
            ", ".join(_outcome(o) for o in update.engines),
            update.cause,
        )
    return table


def _outcome(outcome: fleet_pb2.EngineOutcome) -> str:
    stage = engine_pb2.UpdateStage.Name(outcome.stage).removeprefix("UPDATE_STAGE_").lower()
    word = "lost" if outcome.lost else "waiting" if stage == "unspecified" else stage
    reason = f" ({outcome.error_reason})" if outcome.error_reason else ""
    return f"{outcome.engine.engine_id} {word}{reason}"


def _holds(holds: Iterable[engine_pb2.Hold]) -> str:
    return ", ".join(_hold(h) for h in holds)


def _hold(hold: engine_pb2.Hold) -> str:
    kind = engine_pb2.HoldKind.Name(hold.kind).removeprefix("HOLD_KIND_").lower()
    return f"{kind} ({hold.owner})" if hold.owner else kind


def _ago(seconds: float) -> str:
    return f"{max(seconds, 0):.0f} s ago"


def _lease(seconds: float) -> str:
    return f"{seconds:.0f} s left" if seconds > 0 else "expired"


def _row(table: Table, *cells: str | Text) -> None:
    """Cells are text: a name with brackets in it is no markup."""
    table.add_row(*(Text(c) if isinstance(c, str) else c for c in cells))


def _table(*columns: str) -> Table:
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for column in table.columns:
        column.overflow = "fold"
    return table
