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
STYLES = {
    "serving": "green",
    "ready": "green",
    "receiving": "cyan",
    "installing": "yellow",
    "held": "yellow",
    "draining": "yellow",
    "asleep": "blue",
    "starting": "yellow",
    "stopping": "yellow",
    "empty": "yellow",
    "poisoned": "bold red",
    "dead": "red",
    UNKNOWN: "bold red",
}
PHASE_STYLES = {"committed": "green", "degraded": "yellow", "failed": "red"}


def render_fleet(view: operator_pb2.FleetView, now: float) -> RenderableType:
    """The whole of `weightplane status`. `now` is the wall clock's time in seconds."""
    parts = [*head(view), Text(), engines_table(view, now)]
    if view.trainers:
        parts += [Text(), trainers_table(view.trainers, now)]
    if view.updates:
        parts += [Text(), _updates_table(view.updates)]
    return Group(*parts)


def head(view: operator_pb2.FleetView) -> list[RenderableType]:
    """What stands above the tables."""
    parts: list[RenderableType] = [_head(view)]
    if view.ledger_regressed:
        parts.append(Text(f"LEDGER REGRESSED, nothing is given out: {view.ledger_regressed}", style="bold red"))
    if catching_up := [e for e in view.engines if e.catch_up]:
        parts.append(Text(f"from a checkpoint: {', '.join(map(_catch_up, catching_up))}", style="cyan"))
    return parts


def engines_table(view: operator_pb2.FleetView, now: float) -> Table:
    """One line for each engine."""
    table = new_table("ENGINE", "STATE", "APPLIED", "SERVED", "GATE", "HOLDS", "LIVE", "WAITING", "ENDPOINT", "SEEN")
    for engine in view.engines:
        served = ", ".join(version_text(v) for v in served_versions(view, engine.status.model)) or "none"
        seen = ago(now - engine.report_time.ToMilliseconds() / 1000)
        word = state_word(engine)
        state = Text(word, style=STYLES.get(word, ""))
        name = engine.status.engine.engine_id
        if not engine.known:
            add_row(table, name, state, UNKNOWN, served, UNKNOWN, "", "", "", engine.endpoint, seen)
            continue
        status = engine.status
        add_row(
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
    waiting = view.recovering and not view.ledger_regressed
    whom = f" of {', '.join(view.awaited_engine_ids)}" if view.awaited_engine_ids else ""
    recovering = f" · RECOVERING, waiting for agents' reports{whom}" if waiting else ""
    return Text(f"run {view.run_id} · coordinator term {view.coordinator_term}{recovering} · {models}")


def _catch_up(engine: operator_pb2.EngineView) -> str:
    wanted = version_text(engine.desired) if engine.HasField("desired") else "?"
    return f"{engine.status.engine.engine_id} to {wanted} ({engine.catch_up})"


def _model(state: fleet_pb2.ModelState) -> str:
    served = " and ".join(version_text(v) for v in state.served) or "nothing yet"
    if state.frozen:
        return f"{state.model} is frozen as loaded"
    return f"{state.model} serves {served} (term {state.term}, ordinal {state.ordinal})"


def trainers_table(trainers: Iterable[operator_pb2.TrainerView], now: float) -> Table:
    table = new_table("TRAINER", "MODEL", "TERM", "RANKS", "STEP", "PHASE", "LEASE")
    for trainer in trainers:
        status = trainer.status
        add_row(
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
    table = new_table("UPDATE", "MODEL", "VERSION", "STEP", "PHASE", "ENGINES", "CAUSE")
    for update in list(updates)[:UPDATES_SHOWN]:
        phase = fleet_pb2.UpdatePhase.Name(update.phase).removeprefix("UPDATE_PHASE_").lower()
        add_row(
            table,
            update.update_id,
            update.model,
            _update_version(update),
            str(update.step) if update.HasField("step") else "",
            Text(phase, style=PHASE_STYLES.get(phase, "")),
            ", ".join(f"{o.engine.engine_id} {outcome_text(o)}" for o in update.engines),
            update.cause,
        )
    return table


def _update_version(update: fleet_pb2.UpdateState) -> str:
    restores = f" restores {version_text(update.restores)}" if update.HasField("restores") else ""
    return version_text(update.version) + restores


def outcome_text(outcome: fleet_pb2.EngineOutcome) -> str:
    """`applied`, `lost`, `waiting`, or another stage; with the reason if it ended badly."""
    stage = engine_pb2.UpdateStage.Name(outcome.stage).removeprefix("UPDATE_STAGE_").lower()
    word = "lost" if outcome.lost else "waiting" if stage == "unspecified" else stage
    reason = f" ({outcome.error_reason})" if outcome.error_reason else ""
    return f"{word}{reason}"


def _holds(holds: Iterable[engine_pb2.Hold]) -> str:
    return ", ".join(_hold(h) for h in holds)


def _hold(hold: engine_pb2.Hold) -> str:
    kind = engine_pb2.HoldKind.Name(hold.kind).removeprefix("HOLD_KIND_").lower()
    return f"{kind} ({hold.owner})" if hold.owner else kind


def ago(seconds: float) -> str:
    """How old something is."""
    return f"{max(seconds, 0):.0f} s ago"


def _lease(seconds: float) -> str:
    return f"{seconds:.0f} s left" if seconds > 0 else "expired"


def add_row(table: Table, *cells: str | Text) -> None:
    """Cells are text: a name with brackets in it is no markup."""
    table.add_row(*(Text(c) if isinstance(c, str) else c for c in cells))


def new_table(*columns: str) -> Table:
    """As all of our tables look."""
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for column in table.columns:
        column.overflow = "fold"
    return table
