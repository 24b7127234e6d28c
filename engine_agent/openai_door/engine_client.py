"""What vLLM's API app takes for its engine: the agent's requests, in vLLM's words.

Promises that whatever the app generates goes in by the agent's gate and is one of its live requests: borders are drawn
around it, its output waits while the gate is shut, and poison ends it (INV-11). The engine is asked for every token as
it comes, whatever the app wants, since what is kept back is on no side of a border. Refuses all that would change the
engine: weights, sleep, pauses and caches are the agent's.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from http import HTTPStatus
from typing import Any

from vllm.engine.protocol import EngineClient
from vllm.exceptions import GracefulHTTPError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from controlplane.core import errors as e
from controlplane.core.engine_state import Poisoned
from controlplane.core.pins import ANY
from controlplane.core.versions import EngineId
from engine_agent.engine import GenerationDelta
from engine_agent.life.engine_life import EngineLife
from engine_agent.life.requests import Parts
from engine_agent.openai_door.answers import status_of
from engine_agent.openai_door.visit import MAX_CHOICES, Visit, current
from engine_agent.services.entry import check_ids, enter
from engine_agent.services.merging import merged
from engine_agent.vllm.engine import VllmEngine

HANDED_ON = frozenset(
    {"prompt_text", "trace_headers", "priority", "data_parallel_rank", "session_id", "kv_hints"}
    | {"tokenization_kwargs", "reasoning_ended", "reasoning_parser_kwargs"}
)
"""Arguments of `generate` that vLLM's `add_request` takes too."""


def _refused(name: str) -> Any:
    async def refuse(self: GatedEngineClient, *arguments: Any, **named: Any) -> None:
        raise e.UnsupportedByEngine(engine_id=self.engine_id, what=f"{name} by the OpenAI door")

    return refuse


class GatedEngineClient(EngineClient):  # type: ignore[misc]
    """One life's."""

    def __init__(self, life: EngineLife, engine: VllmEngine) -> None:
        llm = engine.llm
        self._life, self._engine, self._llm = life, engine, llm
        self.vllm_config, self.model_config = llm.vllm_config, llm.model_config
        self.renderer, self.input_processor = llm.renderer, llm.input_processor

    @property
    def engine_id(self) -> EngineId:
        return self._life.core.state.engine_id

    # ---- tokens ----

    def generate(
        self, prompt: Any, sampling_params: SamplingParams, request_id: str, **how: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        visit, first = current.get(), current.get().choices
        visit.choices += sampling_params.n
        return self._generate(visit, first, prompt, sampling_params, request_id, how)

    async def _generate(
        self, visit: Visit, first: int, prompt: Any, asked: SamplingParams, request_id: str, how: Mapping[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        try:
            self._check(visit, prompt, asked, how)
            parts = merged(await self._enter(visit, prompt, asked, request_id, how))
            outputs = _Outputs(request_id, asked, prompt.get("prompt_token_ids"))
            async with aclosing(parts):
                async for index, part in parts:
                    visit.note(first + index, part)
                    self._note_abort(visit, part.delta, request_id)
                    output = outputs.take(index, part.delta)
                    if output is not None:
                        yield output
        except e.WeightplaneError as error:
            visit.error = error  # the door tells it as it is; the app only has to take it for an answer
            raise GracefulHTTPError(str(error), HTTPStatus(status_of(error))) from error

    def _check(self, visit: Visit, prompt: Any, asked: SamplingParams, how: Mapping[str, Any]) -> None:
        """Raises InvalidRequest: what an engine would die of, or nobody could attribute."""
        if not isinstance(prompt, dict) or "prompt_token_ids" not in prompt:
            raise e.InvalidRequest("prompt", "has to be text or token ids, as a whole")
        if visit.choices > MAX_CHOICES:
            raise e.InvalidRequest("n", f"{visit.choices} samples; at most {MAX_CHOICES} at once")
        if how.get("lora_request") is not None:
            raise e.InvalidRequest("model", "the engine serves one model, without adapters")
        if asked.output_kind is RequestOutputKind.CUMULATIVE:
            raise e.InvalidRequest("stream", "deltas, or one answer")
        if self._life.facts is not None:
            check_ids("prompt", prompt["prompt_token_ids"], self._life.facts.vocab_size)
            check_ids("stop_token_ids", asked.stop_token_ids or (), self._life.facts.vocab_size)

    async def _enter(
        self, visit: Visit, prompt: Any, asked: SamplingParams, request_id: str, how: Mapping[str, Any]
    ) -> Sequence[Parts]:
        handed_on = {name: value for name, value in how.items() if name in HANDED_ON}
        version = await enter(self._life, ANY, visit.wait_left)
        # No await between the open gate and the registration: the border is drawn around these requests, or not.
        runs = []
        for i in range(asked.n):
            unique = f"{request_id}-{uuid.uuid4().hex[:12]}"
            deltas = partial(self._engine.generate_native, unique, prompt, _one_of(asked, i), handed_on)
            runs.append(self._life.requests.follow(unique, version, deltas, request_id))
        visit.runs += runs
        return runs

    def _note_abort(self, visit: Visit, delta: GenerationDelta, request_id: str) -> None:
        """The agent ended it. Without a token it is no answer, but a refusal."""
        if delta.finish_reason != "abort" or delta.native is not None:
            return
        weights = self._life.core.state.weights
        if isinstance(weights, Poisoned):
            visit.error = e.EnginePoisoned(engine_id=self.engine_id, cause=weights.cause)
        else:
            visit.error = e.RequestAborted(request_id=request_id)

    # ---- reading ----

    @property
    def is_running(self) -> bool:
        return bool(self._llm.is_running)

    @property
    def is_stopped(self) -> bool:
        return bool(self._llm.is_stopped)

    @property
    def errored(self) -> bool:
        return bool(self._llm.errored)

    @property
    def dead_error(self) -> BaseException:
        error: BaseException = self._llm.dead_error
        return error

    async def check_health(self) -> None:
        await self._llm.check_health()

    async def is_tracing_enabled(self) -> bool:
        return bool(await self._llm.is_tracing_enabled())

    async def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def do_log_stats(self) -> None:
        """The agent has metrics of its own."""

    async def notify_kv_transfer_request_rejected(self, *arguments: Any, **named: Any) -> None:
        await self._llm.notify_kv_transfer_request_rejected(*arguments, **named)

    async def abort(self, request_id: Any) -> None:
        names = {request_id} if isinstance(request_id, str) else set(request_id)
        self._life.requests.abort(names)

    async def is_sleeping(self) -> bool:
        return False

    async def is_paused(self) -> bool:
        return not self._life.open

    # ---- the agent's alone ----

    encode = _refused("encode")
    start_profile = _refused("start_profile")
    stop_profile = _refused("stop_profile")
    reset_mm_cache = _refused("reset_mm_cache")
    reset_encoder_cache = _refused("reset_encoder_cache")
    reset_prefix_cache = _refused("reset_prefix_cache")
    sleep = _refused("sleep")
    release_kv_cache_memory = _refused("release_kv_cache_memory")
    wake_up = _refused("wake_up")
    add_lora = _refused("add_lora")
    pause_generation = _refused("pause_generation")
    resume_generation = _refused("resume_generation")

    def shutdown(self, timeout: float | None = None) -> None:
        """Nothing: the engine is the agent's."""


def _one_of(asked: SamplingParams, index: int) -> SamplingParams:
    """One sample of those asked for, as vLLM itself splits them, with every token as it comes."""
    params = asked.clone()
    params.n = 1
    params.seed = None if asked.seed is None else asked.seed + index
    params.output_kind = RequestOutputKind.DELTA
    params.stream_interval = None
    return params


class _Outputs:
    """The samples of one prompt as the app wants them: each delta, or all of them once they are whole."""

    def __init__(self, request_id: str, asked: SamplingParams, prompt: Sequence[int] | None) -> None:
        self._request_id = request_id
        self._asked = asked
        self._prompt = prompt
        self._whole: dict[int, RequestOutput] = {}
        self._ended: set[int] = set()

    def take(self, index: int, delta: GenerationDelta) -> RequestOutput | None:
        output = delta.native or self._cut(delta)
        if delta.finish_reason is not None:
            self._ended.add(index)
        output.request_id, output.outputs[0].index = self._request_id, index
        output.finished = len(self._ended) == self._asked.n
        if self._asked.output_kind is RequestOutputKind.DELTA:
            return output
        if index in self._whole:
            self._whole[index].add(output, aggregate=True)
        else:
            self._whole[index] = output
        return self._all() if output.finished else None

    def _all(self) -> RequestOutput:
        first, *others = [self._whole[index] for index in sorted(self._whole)]
        first.outputs += [other.outputs[0] for other in others]
        first.finished = True
        return first

    def _cut(self, delta: GenerationDelta) -> RequestOutput:
        """The end of a sample that the agent ended."""
        choice = CompletionOutput(
            index=0,
            text="",
            token_ids=[],
            cumulative_logprob=None,
            logprobs=None if self._asked.logprobs is None else [],
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason or None,
        )
        return RequestOutput(self._request_id, None, self._prompt, None, [choice], finished=True)
