"""Why an engine's gate is shut, in words."""

from __future__ import annotations

from weightplane.v1 import engine_pb2


def holds(status: engine_pb2.EngineStatus) -> set[tuple[str, str]]:
    """Kind and owner of each."""
    return {(engine_pb2.HoldKind.Name(h.kind).removeprefix("HOLD_KIND_"), h.owner) for h in status.holds}


def kinds_held(status: engine_pb2.EngineStatus) -> set[str]:
    return {kind for kind, _ in holds(status)}
