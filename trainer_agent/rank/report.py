"""What a push came to, as the training loop gets it."""

from __future__ import annotations

from dataclasses import dataclass, field

from controlplane.core.errors import DeadlineExceeded, WeightplaneError
from controlplane.core.versions import WeightVersion
from controlplane.rpc.codec import version_from_proto
from trainer_agent import wire
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import engine_pb2, fleet_pb2

_STATUS = {fleet_pb2.UPDATE_PHASE_COMMITTED: "COMMITTED", fleet_pb2.UPDATE_PHASE_DEGRADED: "DEGRADED"}


@dataclass(frozen=True, slots=True)
class PushReport:
    """A push that the fleet committed."""

    version: WeightVersion
    step: int
    status: str
    """COMMITTED, or DEGRADED: not every required engine holds it."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """What became of each engine, by its own report (INV-9): APPLIED, LOST, or another stage and its reason."""
    seconds: float = 0.0
    """From the call to the answer's being read; repeats are included."""
    serving: tuple[str, ...] = ()
    """Engines that were seen to take requests under it, where that was waited for; the first, not all."""


def report_of(result: rank_pb2.PushResult, step: int, seconds: float, serving: tuple[str, ...] = ()) -> PushReport:
    """Of a push that the fleet committed."""
    state = result.state
    outcomes = {e.engine.engine_id: _outcome(e) for e in state.engines}
    return PushReport(version_from_proto(state.version), step, _STATUS[state.phase], outcomes, seconds, serving)


def failure_of(result: rank_pb2.PushResult) -> WeightplaneError:
    """The error of one that it did not commit."""
    error = wire.typed_error(result.error_reason, result.error_metadata, result.error_message)
    if isinstance(error, DeadlineExceeded):
        error.stacks = result.stacks
    return error


def _outcome(engine: fleet_pb2.EngineOutcome) -> str:
    if engine.lost:
        return "LOST"
    stage = engine_pb2.UpdateStage.Name(engine.stage).removeprefix("UPDATE_STAGE_")
    return f"{stage}: {engine.error_reason}" if engine.error_reason else stage
