"""What a push came to, in the words of the local protocol. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from controlplane.core.errors import LinkFailed, UpdateFailed, WeightplaneError, some
from controlplane.core.names import NaturalKey, natural_key
from controlplane.rpc.codec import version_from_proto
from trainer_agent.agent.reasons import update_passes
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import engine_pb2, fleet_pb2

BROKEN = frozenset({"LINK_FAILED", "UPDATE_ABORTED", "REMOTE"})
"""How the end of a link looks to engines that had no part in it."""
_SUCCESS = frozenset({fleet_pb2.UPDATE_PHASE_COMMITTED, fleet_pb2.UPDATE_PHASE_DEGRADED})


@dataclass(frozen=True, slots=True)
class Told:
    """What engines told their streams last."""

    errors: dict[str, WeightplaneError] = field(default_factory=dict)
    required_reasons: dict[str, str] = field(default_factory=dict)
    """Of the errors of those that the commit waits for."""
    deltas: frozenset[str] = frozenset()
    """Engines that are sent one."""


def decided(state: fleet_pb2.UpdateState, *, released: bool) -> rank_pb2.PushResult | None:
    """The result if the fleet serves the version, else None."""
    if state.phase not in _SUCCESS:
        return None
    return rank_pb2.PushResult(state=state, memory_released=released)


def failed(error: WeightplaneError, state: fleet_pb2.UpdateState | None, *, released: bool) -> rank_pb2.PushResult:
    """The result if it does not."""
    return rank_pb2.PushResult(
        state=state,
        memory_released=released,
        error_reason=error.reason,
        error_message=str(error),
        error_metadata=error.metadata(),
    )


def cause_of(state: fleet_pb2.UpdateState, error: WeightplaneError | None, told: Told) -> WeightplaneError:
    """Why the fleet does not serve it. `error`: what ended the push, if not the coordinator's decision."""
    error = error or update_failed(state, state.cause or "no cause given", told.errors)
    if isinstance(error, LinkFailed) and not {*_reported(state).values(), *told.required_reasons.values()} <= BROKEN:
        return update_failed(state, str(error), told.errors)  # an engine says why it left the link
    return error


def passes(state: fleet_pb2.UpdateState, cause: WeightplaneError, told: Told) -> bool:
    """Whether another attempt can do better, by what engines say that the commit waits for; but what a delta met, the
    next attempt does not: it is whole."""
    reasons = [*_reported(state).items(), *told.required_reasons.items()]
    return update_passes(cause, [reason for engine_id, reason in reasons if engine_id not in told.deltas])


def update_failed(state: fleet_pb2.UpdateState, cause: str, errors: dict[str, WeightplaneError]) -> UpdateFailed:
    """The fleet did not commit; `errors` is what engines told their streams."""
    return UpdateFailed(
        update_id=state.update_id,
        version=str(version_from_proto(state.version)) if state.HasField("version") else "unset",
        cause=cause,
        outcomes=_outcomes_text(state.engines, errors),
    )


def lost_engines(state: fleet_pb2.UpdateState) -> set[str]:
    """Engines that will not answer any more, by the coordinator's word."""
    return {e.engine.engine_id for e in state.engines if e.lost}


def awaited_engines(state: fleet_pb2.UpdateState) -> set[str]:
    """Engines that came too late for one update after the other, and are waited for."""
    return {e.engine.engine_id for e in state.engines if e.awaited}


def _reported(state: fleet_pb2.UpdateState) -> dict[str, str]:
    """What required engines told the coordinator that it ended with."""
    return {e.engine.engine_id: e.error_reason for e in state.engines if e.required and e.error_reason}


def _outcomes_text(engines: Iterable[fleet_pb2.EngineOutcome], errors: dict[str, WeightplaneError]) -> str:
    """`engine-0 ABORTED (SHAPE_MISMATCH: …); engine-1 LOST`: by the engine's report, else by its stream's end.

    Of one that was lost its stream's last words are said too: that it is gone is the coordinator's word, not its own.
    """
    texts: dict[str, str] = {}
    for engine in engines:
        name = engine.engine.engine_id
        stage = "LOST" if engine.lost else engine_pb2.UpdateStage.Name(engine.stage).removeprefix("UPDATE_STAGE_")
        texts[name] = f"{stage} ({engine.error_reason}: {engine.error_message})" if engine.error_reason else stage
        if engine.lost and name in errors:
            texts[name] += f", its stream ended with {errors[name].reason}: {errors[name]}"
    for name, error in errors.items():
        if "(" not in texts.get(name, ""):
            texts[name] = f"{texts.get(name, 'UNSPECIFIED')} ({error.reason}: {error})"
    return some((f"{name} {text}" for name, text in sorted(texts.items(), key=_errors_first)), "; ") or "none"


def _errors_first(named: tuple[str, str]) -> tuple[bool, NaturalKey]:
    """Of a large fleet only the first are told."""
    return "(" not in named[1], natural_key(named[0])
