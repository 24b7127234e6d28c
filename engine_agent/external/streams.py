"""Requests over /inference/v1/generate: tokens as they come, and how many each consumer was given.

The count of a stream is raised in the same step of the event loop in which its tokens reach the consumer, as in
`engine_agent.vllm.streams`. A request that the server refuses or ends by an error is its caller's error; a connection
that breaks ends this life, for nobody knows then what was made (INV-11).
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import aiohttp

from controlplane.core.errors import EngineDied, InvalidRequest, RequestAborted
from controlplane.core.sampling import SamplingSettings
from engine_agent.engine import GenerationDelta
from engine_agent.external.server import Server
from engine_agent.vllm.endings import ending

GENERATE = "/inference/v1/generate"
FLOOR = -9999.0
"""What vLLM's HTTP answers have for a log probability that is not finite."""


class Streams:
    """The live requests of one engine."""

    def __init__(self, server: Server, label_of: Callable[[str], str], *, tokenizer: bool) -> None:
        """`tokenizer`: the server has one."""
        self._server = server
        self._tokenizer = tokenizer
        self._label_of = label_of
        self._live: dict[str, int] = {}
        self._tasks: dict[str, asyncio.Future[Any]] = {}

    def __len__(self) -> int:
        return len(self._live)

    def counts(self) -> dict[str, int]:
        """Tokens that each consumer was given."""
        return dict(self._live)

    def agree(self, server: Mapping[str, int]) -> bool:
        """Every consumer was given what the server handed on, and none is left that the server does not know."""
        return all(server.get(request_id) == count for request_id, count in self._live.items())

    def fail(self, error: EngineDied) -> None:
        """Wake every consumer that waits for the server."""
        for waiting in self._tasks.values():
            waiting.cancel()

    async def run(
        self, request_id: str, prompt: Sequence[int], sampling: SamplingSettings, salt: str
    ) -> AsyncGenerator[GenerationDelta, None]:
        """The deltas of one request. Ending early, in any way, closes its connection, and the server aborts it."""
        self._server.raise_if_dead()
        if request_id in self._live:
            raise InvalidRequest("request_id", f"{request_id} is running")
        if sampling.prompt_logprobs and sampling.max_tokens > 1:
            raise InvalidRequest("sampling.prompt_logprobs", "a server streams none: with max_tokens 1 only")
        if sampling.extra:
            await asyncio.to_thread(_check_extra, sampling.extra, self._tokenizer)
        self._live[request_id] = 0
        try:
            body = request_body(request_id, prompt, sampling, salt)
            async with aclosing(self._whole(body) if sampling.prompt_logprobs else self._streamed(body)) as deltas:
                async for delta in deltas:
                    if delta.finish_reason is None:
                        self._live[request_id] += len(delta.token_ids)
                    else:
                        del self._live[request_id]
                    yield delta
                    if delta.finish_reason is not None:
                        return
            raise self._server.died(f"the stream of {request_id} ended without a reason")
        finally:
            self._live.pop(request_id, None)

    async def _streamed(self, body: dict[str, Any]) -> AsyncGenerator[GenerationDelta, None]:
        try:
            async with self._server.http.post(GENERATE, json=body | {"stream": True}, allow_redirects=False) as answer:
                await _require_accepted(answer, body["request_id"])
                while line := await self._or_death(body["request_id"], answer.content.readline()):
                    payload = line.removeprefix(b"data: ").strip()
                    if line.startswith(b"data: ") and payload != b"[DONE]":
                        for choice in _choices(json.loads(payload), body["request_id"]):
                            yield self._delta(choice)
        except (aiohttp.ClientError, OSError) as error:
            raise self._server.died(f"{GENERATE}: {type(error).__name__}: {error}") from error

    async def _whole(self, body: dict[str, Any]) -> AsyncGenerator[GenerationDelta, None]:
        """In one answer: only there are the prompt's log probabilities."""
        answer = await self._or_death(body["request_id"], self.ask(body))
        scores = prompt_scores(answer, body["token_ids"])
        for choice in _choices(answer, body["request_id"]):
            yield self._delta(choice, scores)

    async def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """One whole answer. Raises InvalidRequest, RequestAborted, EngineDied."""
        try:
            async with self._server.http.post(GENERATE, json=body, allow_redirects=False) as answer:
                await _require_accepted(answer, body["request_id"])
                whole: dict[str, Any] = await answer.json()
                return whole
        except (aiohttp.ClientError, OSError) as error:
            raise self._server.died(f"{GENERATE}: {type(error).__name__}: {error}") from error

    async def _or_death(self, request_id: str, work: Any) -> Any:
        """What the server says, or this life's end: a server that hangs would never say anything."""
        task = self._tasks[request_id] = asyncio.ensure_future(work)
        try:
            await asyncio.wait({task})
            if task.cancelled():
                self._server.raise_if_dead()
            return task.result()
        finally:
            task.cancel()
            self._tasks.pop(request_id, None)

    def _delta(self, choice: Mapping[str, Any], scores: tuple[float, ...] = ()) -> GenerationDelta:
        finish_reason, stop_reason = ending(choice["finish_reason"], choice.get("stop_reason"))
        return GenerationDelta(
            token_ids=tuple(choice["token_ids"] or ()),
            logprobs=spoken_logprobs(choice),
            finish_reason=finish_reason,
            stop_reason=stop_reason,
            prompt_logprobs=scores,
            engine_spans=tuple(
                (self._label_of(s["version"]), s["start"], s["end"]) for s in choice.get("weight_versions") or ()
            ),
        )


def request_body(request_id: str, prompt: Sequence[int], sampling: SamplingSettings, salt: str) -> dict[str, Any]:
    """As /inference/v1/generate takes it."""
    params: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": sampling.seed,
        "stop_token_ids": list(sampling.stop_token_ids),
        "ignore_eos": sampling.ignore_eos,
        "min_tokens": sampling.min_tokens,
        "logprobs": sampling.logprobs,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "prompt_logprobs": 0 if sampling.prompt_logprobs else None,
        "detokenize": bool(sampling.extra.get("stop")),
        **sampling.extra,
    }
    body = {"request_id": request_id, "token_ids": list(prompt), "priority": sampling.priority}
    return body | {"cache_salt": salt, "sampling_params": params}


def spoken_logprobs(choice: Mapping[str, Any]) -> tuple[float, ...]:
    """Of the sampled tokens; empty where none was asked for."""
    entries = (choice.get("logprobs") or {}).get("content") or ()
    return tuple(_finite_or_nan(entry["logprob"]) for entry in entries)


def prompt_scores(answer: Mapping[str, Any], prompt: Sequence[int]) -> tuple[float, ...]:
    """Entry i belongs to prompt token i + 1. One that the server left out is not a number."""
    entries = (answer.get("prompt_logprobs") or ())[1:]
    found = ((entry or {}).get(str(token)) for token, entry in zip(prompt[1:], entries, strict=False))
    return tuple(math.nan if one is None else _finite_or_nan(one["logprob"]) for one in found)


def _finite_or_nan(value: float | None) -> float:
    return math.nan if value is None or value <= FLOOR else value


def _choices(answer: Mapping[str, Any], request_id: str) -> list[Mapping[str, Any]]:
    if "error" in answer:
        raise RequestAborted(request_id=request_id)
    choices: list[Mapping[str, Any]] = answer["choices"]
    return choices


async def _require_accepted(answer: aiohttp.ClientResponse, request_id: str) -> None:
    if answer.status in (400, 404, 413, 422):
        raise InvalidRequest("request", (await answer.text(errors="replace"))[:500])
    if answer.status != 200:  # whether the server lives is the probe's to find out
        raise RequestAborted(request_id=request_id)


def _check_extra(given: Mapping[str, Any], tokenizer: bool) -> None:
    """Raises InvalidRequest: the server would drop an unknown name in silence, and text that it cannot look for."""
    from engine_agent.vllm.streams import checked_extra  # imports vLLM

    checked_extra(given, tokenizer=tokenizer)
