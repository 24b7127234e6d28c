"""weightplane.v1.Rollout: requests are checked, wait outside the gate, and get tokens with their versions."""

from __future__ import annotations

import math
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from controlplane.core import errors as e
from controlplane.core.sample_spans import VERSION_CHANGED
from controlplane.core.sampling import SamplingSettings
from controlplane.rpc.codec import pin_from_proto, routed_to_proto, sampling_from_proto, version_to_proto
from controlplane.rpc.sample_codec import finish_reason_to_proto, span_to_proto
from controlplane.tracing import CallTrace, incoming, trace_asked, trace_call
from engine_agent.engine import GenerationDelta
from engine_agent.life.engine_life import EngineLifeHolder
from engine_agent.life.requests import Part, Parts
from engine_agent.life.spans import trace_part
from engine_agent.services.entry import check_identity, check_request, check_scored, enter, wait_of
from engine_agent.services.merging import merged
from weightplane.v1 import rollout_pb2, rollout_pb2_grpc

ROUTED_PART_BYTES = 1 << 20
"""Of routed experts in one message: 4,096 tokens of 48 layers with 8 experts each are 3 MiB."""


class RolloutService(rollout_pb2_grpc.RolloutServicer):
    """Serves whichever life the engine has now."""

    def __init__(self, holder: EngineLifeHolder) -> None:
        self._holder = holder

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        with trace_call("Generate", incoming(context), context.time_remaining) as trace:
            async with aclosing(self._generate(request, trace)) as responses:
                async for response in responses:
                    yield response

    async def _generate(
        self, request: rollout_pb2.GenerateRequest, trace: CallTrace
    ) -> AsyncGenerator[rollout_pb2.GenerateResponse, None]:
        life = self._holder.life
        trace_asked(trace, request)
        trace.note({"weightplane.engine_id": life.core.state.engine_id})
        check_identity(life, request)
        sampling = sampling_from_proto(request.sampling, request.priority)
        if life.facts is not None:
            check_request(life.facts, request.prompt_token_ids, sampling)
        pin = pin_from_proto(request.pin)
        version = await enter(life, pin, wait_of(request.wait if request.HasField("wait") else None))
        trace.entered(str(version))
        # No await between the open gate and the registration: the border is drawn around these requests, or not.
        runs = [
            life.requests.run(
                _unique(request.request_id, "generate"),
                version,
                request.prompt_token_ids,
                one,
                request.request_id,
                exact=pin.exact_version is not None,
            )
            for one in _each(sampling)
        ]
        async with aclosing(merged(runs)) as parts:
            async for index, part in parts:
                trace_part(trace, part)
                for response in _responses(part, len(request.prompt_token_ids), index):
                    yield response

    async def Score(self, request: rollout_pb2.ScoreRequest, context: Any) -> rollout_pb2.ScoreResponse:
        life = self._holder.life
        check_identity(life, request)
        if life.facts is not None:
            check_scored(life.facts, request.token_ids)
        pin = pin_from_proto(request.pin)
        version = await enter(life, pin, wait_of(request.wait if request.HasField("wait") else None))
        sampling = SamplingSettings(max_tokens=1, top_k=1, prompt_logprobs=True, priority=request.priority)
        unique = _unique(request.request_id, "score")
        run = life.requests.run(unique, version, request.token_ids, sampling, request.request_id, exact=True)
        async with aclosing(run) as parts:
            scores = await _scores(unique, parts)
        if len(scores) != len(request.token_ids) - 1 or not all(map(math.isfinite, scores)):
            raise e.ScoreIncomplete(
                request_id=unique, expected=len(request.token_ids) - 1, got=sum(map(math.isfinite, scores))
            )
        return rollout_pb2.ScoreResponse(logprobs=scores, version=version_to_proto(version))

    async def Abort(self, request: rollout_pb2.AbortRequest, context: Any) -> rollout_pb2.AbortResponse:
        life = self._holder.life
        check_identity(life, request)
        return rollout_pb2.AbortResponse(request_ids=life.requests.abort(frozenset(request.request_ids)))


def _unique(name: str, kind: str) -> str:
    return f"{name or kind}-{uuid.uuid4().hex[:12]}"


def _each(sampling: SamplingSettings) -> list[SamplingSettings]:
    """One for each of the samples asked for."""
    seeds = [None if sampling.seed is None else sampling.seed + i for i in range(sampling.n)]
    return [replace(sampling, n=1, seed=seed) for seed in seeds]


async def _scores(request_id: str, parts: Parts) -> tuple[float, ...]:
    """The prompt's logprobs, all of the version that the request began with."""
    scores: tuple[float, ...] = ()
    async for part in parts:
        scores = scores or part.delta.prompt_logprobs
        if part.delta.finish_reason == VERSION_CHANGED:
            raise e.VersionChanged(request_id=request_id)
        if part.delta.finish_reason == "abort":
            raise e.RequestAborted(request_id=request_id)
    return scores


def _responses(part: Part, prompt_tokens: int, index: int) -> Iterator[rollout_pb2.GenerateResponse]:
    """What is large goes in messages of its own, before the one that the part is."""
    delta = part.delta
    if delta.sampling_masks:  # of as many tokens as `top_k`, for each token: one a message
        *first, last = _each_token(delta)
        for one in first:
            yield _response(replace(part, delta=one), prompt_tokens, index)
        part = replace(part, delta=last)
    for routed in [] if delta.routed_experts is None else delta.routed_experts.in_parts(ROUTED_PART_BYTES):
        yield rollout_pb2.GenerateResponse(index=index, routed_experts=routed_to_proto(routed))
    yield _response(part, prompt_tokens, index)


def _each_token(delta: GenerationDelta) -> list[GenerationDelta]:
    """One for each token; with the last one comes what is not of a token."""
    last = len(delta.token_ids) - 1
    return [
        replace(
            delta if i == last else GenerationDelta((), ()),
            token_ids=delta.token_ids[i : i + 1],
            logprobs=delta.logprobs[i : i + 1],
            sampling_masks=delta.sampling_masks[i : i + 1],
        )
        for i in range(last + 1)
    ]


def _response(part: Part, prompt_tokens: int, index: int) -> rollout_pb2.GenerateResponse:
    delta = part.delta
    message = rollout_pb2.GenerateResponse(token_ids=delta.token_ids, logprobs=delta.logprobs, index=index)
    message.sampling_masks.extend(rollout_pb2.SamplingMask(token_ids=mask) for mask in delta.sampling_masks)
    if delta.token_ids:
        message.version.CopyFrom(version_to_proto(part.version))
    if delta.finish_reason is not None:
        message.finish.CopyFrom(
            rollout_pb2.Finish(
                reason=finish_reason_to_proto(delta.finish_reason),
                stop_reason=delta.stop_reason,
                spans=[span_to_proto(s) for s in part.spans],
                prompt_tokens=prompt_tokens,
                cached_prompt_tokens=delta.cached_prompt_tokens,
            )
        )
    return message
