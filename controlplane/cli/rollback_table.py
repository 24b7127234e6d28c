"""A rollback as people follow it: what changed, what became of each engine, and the verdict. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import RenderableType
from rich.text import Text

from controlplane.cli.fleet_table import outcome_text, version_text
from controlplane.cli.tables import add_row, new_table
from weightplane.v1 import fleet_pb2

_STYLES = {"applied": "green", "lost": "red", "failed": "red", "aborted": "red", "waiting": "yellow"}


def changes(before: fleet_pb2.UpdateState, after: fleet_pb2.UpdateState) -> Iterator[str]:
    """What a newer state says that the one before did not, as lines."""
    known = {o.engine.engine_id: outcome_text(before, o) for o in before.engines}
    if after.phase == fleet_pb2.UPDATE_PHASE_GO and before.phase != after.phase:
        yield "go: every engine that it needs is ready"
    for outcome in after.engines:
        text = outcome_text(after, outcome)
        if text not in (known.get(outcome.engine.engine_id), "waiting"):
            yield f"{outcome.engine.engine_id} {text}"


def render_outcomes(state: fleet_pb2.UpdateState) -> RenderableType:
    """One line for each engine."""
    table = new_table("ENGINE", "REQUIRED", "OUTCOME", "WHY")
    for outcome in state.engines:
        text = outcome_text(state, outcome)
        add_row(
            table,
            outcome.engine.engine_id,
            "yes" if outcome.required else "no",
            Text(text, style=_STYLES.get(text.partition(" ")[0], "")),
            outcome.error_message,
        )
    return table


def verdict(state: fleet_pb2.UpdateState) -> str:
    """What the fleet serves now, in one sentence."""
    new, restored = version_text(state.version), version_text(state.restores)
    match state.phase:
        case fleet_pb2.UPDATE_PHASE_COMMITTED:
            return f"committed: the fleet serves {new}, with the weights of {restored}"
        case fleet_pb2.UPDATE_PHASE_DEGRADED:
            return f"degraded: the fleet serves {new}, but not every engine that it needs holds it: {state.cause}"
        case _:
            return f"failed: what was served is served on: {state.cause}"
