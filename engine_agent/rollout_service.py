"""weightplane.v1.Rollout: requests are checked, wait outside the gate, and get tokens with their versions."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from controlplane.core import errors as e
from controlplane.core.engine_state import EngineState, HoldKind, Life, Poisoned
from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import WeightVersion
from controlplane.rpc.codec import sampling_from_proto, seconds_from_proto, version_from_proto, version_to_proto
from engine_agent.engine import EngineFacts
from engine_agent.life import EngineLife, EngineLifeHolder
from engine_agent.requests import Part, Span
from weightplane.v1 import rollout_pb2, rollout_pb2_grpc

DEFAULT_WAIT_SECONDS = 30.0
MAX_WAITING = 1024
"""Requests that wait outside the gate; one more is refused at once."""

_REASONS = {
    "stop": rollout_pb2.FINISH_REASON_STOP,
    "length": rollout_pb2.FINISH_REASON_LENGTH,
    "abort": rollout_pb2.FINISH_REASON_ABORT,
}


class RolloutService(rollout_pb2_grpc.RolloutServicer):
    """Serves whichever life the engine has now."""

    def __init__(self, holder: EngineLifeHolder) -> None:
        self._holder = holder

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        life = self._holder.life
        _check_identity(life, request)
        sampling = sampling_from_proto(request.sampling)
        if life.facts is not None:
            check_request(life.facts, request.prompt_token_ids, sampling)
        version = await _enter(life, request)
        # No await between the open gate and the registration: the border is drawn around this request, or not.
        unique = f"{request.request_id or 'generate'}-{uuid.uuid4().hex[:12]}"
        parts = life.requests.run(unique, version, request.prompt_token_ids, sampling, request.request_id)
        async with aclosing(parts) as open_parts:
            async for part in open_parts:
                yield _response(part, len(request.prompt_token_ids))


def check_request(facts: EngineFacts, prompt: Any, sampling: SamplingSettings) -> None:
    """Refuse what the engine would die of, or change in silence. Raises InvalidRequest."""
    _check_ids("prompt_token_ids", prompt, facts.vocab_size)
    _check_ids("sampling.stop_token_ids", sampling.stop_token_ids, facts.vocab_size)
    room = facts.max_model_len - len(prompt)
    if sampling.max_tokens > room:
        raise e.InvalidRequest(
            "sampling.max_tokens",
            f"{len(prompt)} prompt tokens and {sampling.max_tokens} more pass the engine's {facts.max_model_len}",
        )
    checks = [
        ("temperature", 0.0 <= sampling.temperature <= 100.0, "must be between 0 and 100"),
        ("top_p", 0.0 < sampling.top_p <= 1.0, "must be above 0 and at most 1"),
        ("min_p", 0.0 <= sampling.min_p <= 1.0, "must be between 0 and 1"),
        ("min_tokens", sampling.min_tokens <= sampling.max_tokens, "must be at most max_tokens"),
        ("presence_penalty", -2.0 <= sampling.presence_penalty <= 2.0, "must be between -2 and 2"),
        ("frequency_penalty", -2.0 <= sampling.frequency_penalty <= 2.0, "must be between -2 and 2"),
        ("repetition_penalty", 0.0 < sampling.repetition_penalty <= 100.0, "must be above 0 and at most 100"),
    ]
    for name, good, problem in checks:
        if not good:
            raise e.InvalidRequest(f"sampling.{name}", problem)


def _check_ids(field: str, ids: Any, vocab_size: int) -> None:
    if len(ids) and max(ids) >= vocab_size:
        raise e.InvalidRequest(field, f"{max(ids)} is outside of the vocabulary of {vocab_size}")


def _check_identity(life: EngineLife, request: rollout_pb2.GenerateRequest) -> None:
    state = life.core.state
    if request.run_id != state.run_id:
        raise e.WrongRun(expected=state.run_id, got=request.run_id)
    if request.model != state.model:
        raise e.WrongModel(expected=state.model, got=request.model)


async def _enter(life: EngineLife, request: rollout_pb2.GenerateRequest) -> WeightVersion:
    """Wait outside the gate until it is open and the pin is met; the version to begin with."""
    wanted = version_from_proto(request.min_version) if request.HasField("min_version") else None
    limit = seconds_from_proto(request.wait) if request.HasField("wait") else DEFAULT_WAIT_SECONDS
    if life.waiting >= MAX_WAITING:
        raise e.LimitExceeded(what="requests waiting outside the gate", limit=MAX_WAITING, got=life.waiting + 1)

    def may_enter(state: EngineState) -> bool:
        if state.life in (Life.STOPPING, Life.DEAD):
            raise e.EngineNotReady(engine_id=state.engine_id, holds=state.life.value)
        if isinstance(state.weights, Poisoned) and not state.installing:
            raise e.EnginePoisoned(engine_id=state.engine_id, cause=state.weights.cause)
        draining = state.held_by(HoldKind.DRAINING)
        if draining is not None:
            raise e.EngineDraining(engine_id=state.engine_id, owner=draining)
        applied = state.applied
        return life.open and applied is not None and (wanted is None or applied.number >= wanted.number)

    life.waiting += 1
    try:
        state = await life.state.wait_for(may_enter, limit)
    except TimeoutError:
        raise _not_entered(life, wanted) from None
    finally:
        life.waiting -= 1
    applied = state.applied
    assert applied is not None  # may_enter saw it, and nothing ran since
    return applied


def _not_entered(life: EngineLife, wanted: WeightVersion | None) -> e.WeightplaneError:
    state = life.core.state
    if wanted is not None and (state.applied is None or state.applied.number < wanted.number):
        applied = "unset" if state.applied is None else str(state.applied)
        return e.VersionUnavailable(wanted=str(wanted), applied=applied)
    holds = ", ".join(sorted(map(str, state.holds))) or state.word(life.core.served)
    return e.EngineNotReady(engine_id=state.engine_id, holds=holds)


def _response(part: Part, prompt_tokens: int) -> rollout_pb2.GenerateResponse:
    delta = part.delta
    message = rollout_pb2.GenerateResponse(token_ids=delta.token_ids, logprobs=delta.logprobs)
    if delta.token_ids:
        message.version.CopyFrom(version_to_proto(part.version))
    if delta.finish_reason is not None:
        message.finish.CopyFrom(
            rollout_pb2.Finish(
                reason=_REASONS.get(delta.finish_reason, rollout_pb2.FINISH_REASON_ABORT),
                stop_reason=delta.stop_reason,
                spans=[_span(s) for s in part.spans],
                prompt_tokens=prompt_tokens,
                cached_prompt_tokens=delta.cached_prompt_tokens,
            )
        )
    return message


def _span(span: Span) -> rollout_pb2.VersionSpan:
    return rollout_pb2.VersionSpan(version=version_to_proto(span.version), start=span.start, end=span.end)
