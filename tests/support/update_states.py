"""States of an update, as the coordinator tells a trainer of them."""

from __future__ import annotations

from weightplane.v1 import engine_pb2, fleet_pb2, version_pb2


def state(phase: fleet_pb2.UpdatePhase.ValueType, **engines: str) -> fleet_pb2.UpdateState:
    made = fleet_pb2.UpdateState(update_id="u", phase=phase, version=version_pb2.WeightVersion(term=1, number=5))
    for name, reason in engines.items():
        made.engines.add(
            engine=version_pb2.EngineRef(engine_id=name, incarnation="i"),
            required=True,
            stage=engine_pb2.UPDATE_STAGE_ABORTED,
            error_reason=reason,
            error_message="why" if reason else "",
        )
    return made


FAILED = fleet_pb2.UPDATE_PHASE_FAILED
