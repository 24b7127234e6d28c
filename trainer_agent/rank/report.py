"""What a push came to, as the training loop gets it."""

from __future__ import annotations

from dataclasses import dataclass, field

import structlog

from controlplane.core.errors import DeadlineExceeded, WeightplaneError
from controlplane.core.versions import WeightVersion
from controlplane.rpc.codec import version_from_proto
from trainer_agent import wire
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import engine_pb2, fleet_pb2, version_pb2

log = structlog.get_logger(__name__)

UNDECIDED = "UNDECIDED"
_STATUS = {fleet_pb2.UPDATE_PHASE_COMMITTED: "COMMITTED", fleet_pb2.UPDATE_PHASE_DEGRADED: "DEGRADED"}


@dataclass(frozen=True, slots=True)
class PushReport:
    """A push that the fleet committed, unless `status` says that it is not decided yet."""

    version: WeightVersion
    step: int
    status: str
    """COMMITTED, or DEGRADED: not every required engine holds it. Of a push that waited for `released` alone also
    UNDECIDED: its memory was free before the fleet decided, and nothing else is known."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """What became of each engine, by its own report (INV-9): APPLIED, LOST, or another stage and its reason."""
    changed: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By engine that applied it: how many tensors differ from what it held before, of how many. None at its first."""
    verified: dict[str, str] = field(default_factory=dict)
    """By engine that applied it: `reference`, `majority` or `unverified`; see `controlplane.core.canary`."""
    seconds: float = 0.0
    """From the call to the answer's being read; repeats are included."""
    serving: tuple[str, ...] = ()
    """Engines that were seen to take requests under it, where that was waited for; the first, not all."""

    @property
    def unchanged(self) -> list[str]:
        """Engines that were brought just what they held before: perhaps the wrong model was pushed."""
        return [name for name, (tensors, _) in self.changed.items() if not tensors]


def report_of(result: rank_pb2.PushResult, step: int, seconds: float, serving: tuple[str, ...] = ()) -> PushReport:
    """Of a push that the fleet committed."""
    state = result.state
    outcomes = {e.engine.engine_id: _outcome(e) for e in state.engines}
    applied = [e for e in state.engines if e.stage == engine_pb2.UPDATE_STAGE_APPLIED]
    counted = [e for e in applied if e.HasField("changed_tensors")]
    changed = {e.engine.engine_id: (e.changed_tensors, e.tensor_count) for e in counted}
    report = PushReport(
        version_from_proto(state.version),
        step,
        _STATUS[state.phase],
        outcomes,
        changed,
        {e.engine.engine_id: _verified(e.verification) for e in applied},
        seconds,
        serving,
    )
    for name in report.unchanged:
        log.warning("nothing_changed", engine_id=name, tensors=changed[name][1], version=str(report.version), step=step)
    return report


def undecided(version: version_pb2.WeightVersion, step: int, seconds: float) -> PushReport:
    """Of a push that the fleet has not decided yet."""
    return PushReport(version_from_proto(version), step, UNDECIDED, seconds=seconds)


def _verified(verification: engine_pb2.Verification.ValueType) -> str:
    return engine_pb2.Verification.Name(verification).removeprefix("VERIFICATION_").lower()


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
