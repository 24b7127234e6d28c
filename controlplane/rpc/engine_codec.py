"""An engine's state between the core and the wire. The agent writes it, the coordinator and people read it. No gRPC."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.timestamp_pb2 import Timestamp

from controlplane.core.canary import Canary, CanaryReference
from controlplane.core.conditions import Condition
from controlplane.core.engine_state import (
    EngineState,
    Held,
    Hold,
    HoldKind,
    Life,
    Poisoned,
    Progress,
    Refusal,
    Residency,
    Stage,
    Timings,
    Unset,
    Weights,
)
from controlplane.core.errors import FrameInvalid
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, UpdateId, WeightVersion
from controlplane.rpc.codec import (
    engine_ref,
    seconds_from_proto,
    seconds_to_proto,
    version_from_proto,
    version_to_proto,
)
from weightplane.v1 import engine_pb2, weight_update_pb2

_LIVES = {v: engine_pb2.EngineLife.Value(f"ENGINE_LIFE_{v.name}") for v in Life}
_LIVES_BACK = {v: k for k, v in _LIVES.items()}
_HOLDS = {v: engine_pb2.HoldKind.Value(f"HOLD_KIND_{v.name}") for v in HoldKind}
_HOLDS_BACK = {v: k for k, v in _HOLDS.items()}
_RESIDENCIES = {v: engine_pb2.Residency.Value(f"RESIDENCY_{v.name}") for v in Residency}
_RESIDENCIES_BACK = {v: k for k, v in _RESIDENCIES.items()}
_STATUSES = {
    True: engine_pb2.CONDITION_STATUS_TRUE,
    False: engine_pb2.CONDITION_STATUS_FALSE,
    None: engine_pb2.CONDITION_STATUS_UNKNOWN,
}
STAGES = {v: engine_pb2.UpdateStage.Value(f"UPDATE_STAGE_{v.name}") for v in Stage}
_STAGES_BACK = {v: k for k, v in STAGES.items()}


def state_to_proto(state: EngineState, served: frozenset[WeightVersion]) -> engine_pb2.EngineStatus:
    """The full status. `served` decides the gate and the word, as it does at the agent."""
    message = engine_pb2.EngineStatus(
        engine=engine_ref(state.engine_id, state.incarnation),
        run_id=state.run_id,
        model=state.model,
        life=_LIVES[state.life],
        gate_open=state.gate_open(served),
        live_requests=state.live_requests,
        waiting_requests=state.waiting_requests,
        word=state.word(served),
        residency=_RESIDENCIES[state.residency],
        frozen=state.frozen,
        tokens_by_lag=state.tokens_by_lag,
    )
    _weights_to_proto(state.weights, message)
    if state.canary is not None:
        message.canary.CopyFrom(canary_to_proto(state.canary))
    ordered = sorted(state.holds, key=lambda h: (h.kind.value, h.owner))
    message.holds.extend(engine_pb2.Hold(kind=_HOLDS[h.kind], owner=h.owner) for h in ordered)
    if state.progress is not None:
        message.update.CopyFrom(_progress_to_proto(state.progress))
    return message


def state_from_proto(message: engine_pb2.EngineStatus) -> EngineState:
    """Raises FrameInvalid when `applied` and `weights` contradict each other (V11: unset is explicit)."""
    return EngineState(
        run_id=RunId(message.run_id),
        model=ModelName(message.model),
        engine_id=EngineId(message.engine.engine_id),
        incarnation=Incarnation(message.engine.incarnation),
        life=_LIVES_BACK[message.life],
        weights=_weights_from_proto(message),
        holds=frozenset(Hold(_HOLDS_BACK[h.kind], h.owner) for h in message.holds),
        progress=_progress_from_proto(message.update) if message.HasField("update") else None,
        live_requests=message.live_requests,
        waiting_requests=message.waiting_requests,
        residency=_RESIDENCIES_BACK[message.residency],
        canary=_canary_from_proto(message.canary) if message.HasField("canary") else None,
        frozen=message.frozen,
        tokens_by_lag=tuple(message.tokens_by_lag),
    )


def refusal_to_proto(refusal: Refusal, shift: float) -> engine_pb2.Refusal:
    """`shift` seconds turn the keeper's monotonic time into the clock's."""
    return engine_pb2.Refusal(
        version=version_to_proto(refusal.version),
        reason=refusal.reason,
        message=refusal.message[:4096],
        time=timestamp(refusal.at + shift),
    )


def refusal_from_proto(message: engine_pb2.EngineStatus, shift: float) -> Refusal | None:
    """The inverse; None where the status has none."""
    if not message.HasField("refused"):
        return None
    refused = message.refused
    at = refused.time.ToNanoseconds() / 1e9 - shift
    return Refusal(version_from_proto(refused.version), refused.reason, refused.message, at)


def conditions_to_proto(conditions: Iterable[Condition], shift: float) -> list[engine_pb2.Condition]:
    """`shift` seconds turn the keeper's monotonic time into the clock's."""
    return [
        engine_pb2.Condition(
            type=c.type.value,
            status=_STATUSES[c.status],
            reason=c.reason,
            message=c.message[:4096],
            last_transition_time=timestamp(c.since + shift),
        )
        for c in conditions
    ]


def timestamp(seconds: float) -> Timestamp:
    """Of seconds since the epoch."""
    stamp = Timestamp()
    stamp.FromNanoseconds(int(seconds * 1e9))
    return stamp


def timings_to_proto(timings: Timings) -> weight_update_pb2.InstallTimings:
    return weight_update_pb2.InstallTimings(
        quiesce=seconds_to_proto(timings.quiesce),
        install=seconds_to_proto(timings.install),
        caches=seconds_to_proto(timings.caches),
        canary=seconds_to_proto(timings.canary),
        wait=seconds_to_proto(timings.wait),
    )


def canary_to_proto(canary: Canary) -> weight_update_pb2.Canary:
    return weight_update_pb2.Canary(
        prompt_logprobs=canary.prompt_logprobs, tokens=canary.tokens, by_reference=canary.by_reference
    )


def _canary_from_proto(message: weight_update_pb2.Canary) -> Canary:
    return Canary(tuple(message.prompt_logprobs), tuple(message.tokens), message.by_reference)


def reference_to_proto(reference: CanaryReference) -> weight_update_pb2.CanaryReference:
    return weight_update_pb2.CanaryReference(
        prompt_token_ids=reference.prompt_token_ids,
        prompt_logprobs=reference.prompt_logprobs,
        tolerance=reference.tolerance,
    )


def reference_from_proto(message: weight_update_pb2.CanaryReference) -> CanaryReference:
    return CanaryReference(tuple(message.prompt_token_ids), tuple(message.prompt_logprobs), message.tolerance)


def _weights_to_proto(weights: Weights, message: engine_pb2.EngineStatus) -> None:
    match weights:
        case Held(version, digest):
            message.weights = engine_pb2.WEIGHTS_STATE_HELD
            message.applied.CopyFrom(version_to_proto(version))
            message.content_digest = digest
        case Poisoned(cause):
            message.weights = engine_pb2.WEIGHTS_STATE_POISONED
            message.poison_cause = cause[:4096]
        case Unset():
            message.weights = engine_pb2.WEIGHTS_STATE_UNSET


def _weights_from_proto(message: engine_pb2.EngineStatus) -> Weights:
    held = message.weights == engine_pb2.WEIGHTS_STATE_HELD
    if held != message.HasField("applied"):
        raise FrameInvalid("EngineStatus", "applied", "belongs to HELD weights, and only to them")
    if held:
        return Held(version_from_proto(message.applied), message.content_digest)
    if message.weights == engine_pb2.WEIGHTS_STATE_POISONED:
        return Poisoned(message.poison_cause)
    return Unset()


def _progress_to_proto(progress: Progress) -> engine_pb2.UpdateProgress:
    message = engine_pb2.UpdateProgress(
        update_id=progress.update_id,
        version=version_to_proto(progress.version),
        stage=STAGES[progress.stage],
        bytes_received=progress.bytes_received,
        error_reason=progress.error_reason,
        error_message=progress.error_message[:4096],
        changed_tensors=progress.changed_tensors,
        tensor_count=progress.tensor_count,
    )
    if progress.timings is not None:
        message.timings.CopyFrom(timings_to_proto(progress.timings))
    return message


def _progress_from_proto(message: engine_pb2.UpdateProgress) -> Progress:
    timings = None
    if message.HasField("timings"):
        t = message.timings
        parts = (seconds_from_proto(p) for p in (t.quiesce, t.install, t.caches, t.canary, t.wait))
        timings = Timings(*parts)
    return Progress(
        update_id=UpdateId(message.update_id),
        version=version_from_proto(message.version),
        stage=_STAGES_BACK[message.stage],
        bytes_received=message.bytes_received,
        error_reason=message.error_reason,
        error_message=message.error_message,
        timings=timings,
        changed_tensors=message.changed_tensors if message.HasField("changed_tensors") else None,
        tensor_count=message.tensor_count,
    )
