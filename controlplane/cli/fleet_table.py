"""The fleet as a table: what the coordinator knows, in the words of the contract.

An engine whose session is lost is UNKNOWN, whatever it said last (INV-8): its last words are shown in no column.
Pure: takes the view and the time, gives something that rich can print.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from controlplane.cli.tables import add_row, new_table, table_of
from controlplane.rpc.enum_words import word_of
from weightplane.v1 import engine_pb2, fleet_pb2, operator_pb2, version_pb2

UPDATES_SHOWN = 5
ID_SHOWN = 8
"""Of an update's id; commands take as little of it as is not another's."""
OPEN = (fleet_pb2.UPDATE_PHASE_PREPARING, fleet_pb2.UPDATE_PHASE_GO)
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
_UNITS = ((48 * 3600, 24 * 3600, "d"), (2 * 3600, 3600, "h"), (120, 60, "min"))
"""From that many seconds on, counted in so many, called so."""
PHASE_STYLES = {"committed": "green", "degraded": "yellow", "failed": "red"}


def render_fleet(view: operator_pb2.FleetView, now: float) -> RenderableType:
    """The whole of `weightplane status`. `now` is the wall clock's time in seconds."""
    parts = [*head(view), Text(), engines_table(view, now) if view.engines else Text("no engine is known")]
    if view.trainers:
        parts += [Text(), trainers_table(view.trainers, now)]
    if view.updates:
        parts += [Text(), *_updates_table(view.updates)]
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
    columns = ("ENGINE", "STATE", "APPLIED", "SERVED", "GATE", "HOLDS", "LIVE", "WAITING", "ENDPOINT", "SEEN")
    return table_of(columns, (_engine_row(view, engine, now) for engine in view.engines), where_said=("HOLDS",))


def _engine_row(view: operator_pb2.FleetView, engine: operator_pb2.EngineView, now: float) -> list[str | Text]:
    status, word = engine.status, state_word(engine)
    served = ", ".join(version_text(v) for v in served_versions(view, status.model)) or "none"
    said = [UNKNOWN, "", "", ""]
    if engine.known:
        gate = "open" if status.gate_open else "shut"
        said = [gate, _holds(status.holds), str(status.live_requests), str(status.waiting_requests)]
    return [
        status.engine.engine_id,
        Text(word, style=STYLES.get(word, "")),
        applied_word(engine),
        served,
        *said,
        engine.endpoint,
        ago(now - engine.report_time.ToMilliseconds() / 1000),
    ]


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
            _phase(trainer),
            "" if trainer.left else _lease(trainer.lease_expire_time.ToMilliseconds() / 1000 - now),
        )
    return table


def _phase(trainer: operator_pb2.TrainerView) -> Text:
    """Silence is an alarm, a goodbye is none."""
    if trainer.connected:
        lost = lost_ranks(trainer)
        return Text(f"lost {lost}", style="red") if lost else Text(trainer.status.phase)
    return Text("left") if trainer.left else Text("not connected", style="red")


def lost_ranks(trainer: operator_pb2.TrainerView) -> str:
    """The first of its ranks that ended without leaving, and how many more did; empty: none."""
    if not trainer.status.lost_ranks:
        return ""
    first, *others = trainer.status.lost_ranks
    more = f", and {len(others)} more" if others else ""
    return f"rank {first.rank} ({first.cause}){more}"


def _updates_table(updates: Sequence[fleet_pb2.UpdateState]) -> list[RenderableType]:
    shown = updates[:UPDATES_SHOWN]
    table = new_table("UPDATE", "MODEL", "VERSION", "STEP", "PHASE", "ENGINES")
    for update in shown:
        phase = phase_word(update)
        add_row(
            table,
            update.update_id[:ID_SHOWN],
            update.model,
            _update_version(update),
            str(update.step) if update.HasField("step") else "",
            Text(phase, style=PHASE_STYLES.get(phase, "")),
            ", ".join(f"{o.engine.engine_id} {outcome_text(update, o)}" for o in update.engines),
        )
    return [table, *cause_lines(shown)]


def cause_lines(updates: Iterable[fleet_pb2.UpdateState]) -> list[Text]:
    """Why updates ended as they did, below their table: a column of its own would be narrow."""
    lines = [Text(f"{u.update_id[:ID_SHOWN]}: {u.cause}") for u in updates if u.cause]
    return [Text(), *lines] if lines else []


def phase_word(update: fleet_pb2.UpdateState) -> str:
    return word_of(fleet_pb2.UpdatePhase, update.phase)


def _update_version(update: fleet_pb2.UpdateState) -> str:
    restores = f" restores {version_text(update.restores)}" if update.HasField("restores") else ""
    return version_text(update.version) + restores


def outcome_text(update: fleet_pb2.UpdateState, outcome: fleet_pb2.EngineOutcome) -> str:
    """`applied`, `lost`, `waiting`, or another stage; with the reason if it ended badly. Of a decided update nobody
    waits any more: `not begun`."""
    stage = word_of(engine_pb2.UpdateStage, outcome.stage)
    if stage == "unspecified":
        stage = "waiting" if update.phase in OPEN else "not begun"
    word = "lost" if outcome.lost else stage
    reason = f" ({outcome.error_reason})" if outcome.error_reason else ""
    return f"{word}{reason}"


def _holds(holds: Iterable[engine_pb2.Hold]) -> str:
    return ", ".join(_hold(h) for h in holds)


def _hold(hold: engine_pb2.Hold) -> str:
    kind = word_of(engine_pb2.HoldKind, hold.kind)
    return f"{kind} ({hold.owner})" if hold.owner else kind


def ago(seconds: float) -> str:
    """How old something is."""
    return f"{since(seconds)} ago"


def since(seconds: float) -> str:
    """How long something has been so, in one unit."""
    for at_least, unit, word in _UNITS:
        if seconds >= at_least:
            return f"{seconds // unit:.0f} {word}"
    return f"{max(seconds, 0):.0f} s"


def _lease(seconds: float) -> str:
    return f"{seconds:.0f} s left" if seconds > 0 else "expired"
