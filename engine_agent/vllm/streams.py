"""The live requests of one engine: what each consumer was given, and when nothing is on its way any more.

The count of a stream is the border of a span (INV-11). It is raised in the same step of the event loop in which
the tokens reach the consumer, and `drained` is true only when vLLM's output handler has nothing in hand and no
collector holds a token. Refuses a second live request of one id.
"""

from __future__ import annotations

import math
import typing
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from controlplane.core.errors import EngineDied, InvalidRequest
from controlplane.core.routed_experts import RoutedExperts
from controlplane.core.sampling import SamplingSettings
from engine_agent.engine import GenerationDelta
from engine_agent.vllm.calls import Core, is_death
from engine_agent.vllm.endings import ending

NEED_A_TOKENIZER = frozenset({"stop", "bad_words"})
"""Fields that vLLM takes without one too, and then forgets."""


class OutputTap:
    """Stands in front of the queue from which vLLM's output handler takes what the core has sent.

    The handler asks for more only when it has handed on all it took before, and taking leaves no gap: an item is
    in the queue until the handler runs with it. So a waiting handler and an empty queue mean that all is handed on.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._queue = llm.engine_core.outputs_queue
        self._take = llm.engine_core.get_output_async
        self._waiting = False
        llm.engine_core.get_output_async = self._take_noted

    @property
    def idle(self) -> bool:
        started = self._llm.output_handler is not None  # vLLM starts it with the first request
        return not started or (self._waiting and self._queue.empty())

    async def _take_noted(self) -> Any:
        self._waiting = True
        try:
            return await self._take()
        finally:
            self._waiting = False


class Stream:
    """One live request."""

    def __init__(self, first_routed: int = 0) -> None:
        self.count = 0
        """Tokens that the consumer has been given."""
        self.collector: Any = None
        """vLLM's hand-over object; None while the request is on its way into the engine."""
        self.scored = False
        """The prompt's logprobs were handed on."""
        self.first_routed = first_routed
        """The first token whose experts were asked for."""

    @property
    def drained(self) -> bool:
        return self.collector is not None and self.collector.output is None


class Streams:
    def __init__(self) -> None:
        self._live: dict[str, Stream] = {}
        self._tap: OutputTap | None = None

    def attach(self, llm: Any) -> None:
        self._tap = OutputTap(llm)

    def __len__(self) -> int:
        return len(self._live)

    @property
    def drained(self) -> bool:
        """No token is between the engine core and a consumer. Means something only while the scheduler stands."""
        return (self._tap is None or self._tap.idle) and all(s.drained for s in self._live.values())

    def counts(self) -> dict[str, int]:
        return {request_id: s.count for request_id, s in self._live.items()}

    def fail(self, error: EngineDied) -> None:
        """Wake every consumer with the engine's death, in case vLLM does not."""
        for stream in self._live.values():
            if stream.collector is not None:
                stream.collector.put(error)

    def run(
        self, core: Core, request_id: str, prompt: Sequence[int], sampling: SamplingSettings, salt: str
    ) -> AsyncGenerator[GenerationDelta, None]:
        """The deltas of one request. Ending early, in any way, aborts it in the engine."""
        admit = partial(_admit, core, request_id, prompt, sampling, salt)
        first_routed = int(sampling.extra.get("routed_experts_prompt_start", 0))
        return self._run(core, request_id, admit, _delta, first_routed)

    def run_native(
        self, core: Core, request_id: str, prompt: Mapping[str, Any], params: Any, salt: str, how: Mapping[str, Any]
    ) -> AsyncGenerator[GenerationDelta, None]:
        """The same for a request in vLLM's own words; each delta has vLLM's output beside it. `params` must ask for
        deltas, with every token: what is kept back is on no side of a border (INV-11)."""
        admit = partial(_admit_native, core, request_id, prompt, params, salt, how)
        return self._run(core, request_id, admit, _native_delta)

    async def _run(
        self,
        core: Core,
        request_id: str,
        admit: Callable[[], Awaitable[Any]],
        read: Callable[[Any, Stream], GenerationDelta],
        first_routed: int = 0,
    ) -> AsyncGenerator[GenerationDelta, None]:
        if request_id in self._live:
            raise InvalidRequest("request_id", f"{request_id} is running")
        core.raise_if_dead()
        stream = self._live[request_id] = Stream(first_routed)
        finished = False
        try:
            stream.collector = await admit()
            while not finished:
                delta = await _next_delta(core, stream, read)
                finished = delta.finish_reason is not None
                if finished:
                    del self._live[request_id]
                yield delta
        finally:
            self._live.pop(request_id, None)
            if not finished and stream.collector is not None:
                await core.llm.abort(stream.collector.request_id, internal=True)


async def _admit(core: Core, request_id: str, prompt: Sequence[int], sampling: SamplingSettings, salt: str) -> Any:
    from vllm.inputs.engine import tokens_input

    params = sampling_params(sampling, tokenizer=core.llm.tokenizer is not None)
    salted = tokens_input(list(prompt), cache_salt=salt or None)
    return await _add(core, request_id, salted, params, {"priority": sampling.priority})


async def _admit_native(
    core: Core, request_id: str, prompt: Mapping[str, Any], params: Any, salt: str, how: Mapping[str, Any]
) -> Any:
    """A caller's own salt keeps its prefixes apart within a version."""
    salts = [text for text in (salt, prompt.get("cache_salt")) if text]
    return await _add(core, request_id, {**prompt, "cache_salt": "/".join(salts) or None}, params, how)


async def _add(core: Core, request_id: str, prompt: Any, params: Any, how: Mapping[str, Any]) -> Any:
    from vllm.exceptions import VLLMClientError

    try:
        return await core.llm.add_request(request_id, prompt, params, **how)
    except (VLLMClientError, ValueError) as e:  # some of its checks of a request raise plain ValueErrors
        raise InvalidRequest("request", str(e)) from e
    except Exception as e:
        if is_death(e):
            raise core.died(str(e)) from e
        raise


async def _next_delta(core: Core, stream: Stream, read: Callable[[Any, Stream], GenerationDelta]) -> GenerationDelta:
    try:
        output = stream.collector.get_nowait() or await stream.collector.get()
    except Exception as e:
        if is_death(e):
            raise core.died(str(e)) from e
        raise
    delta = read(output, stream)
    stream.count += len(delta.token_ids)
    return delta


def _delta(output: Any, stream: Stream) -> GenerationDelta:
    choice = output.outputs[0]
    finish_reason, stop_reason = ending(choice.finish_reason, choice.stop_reason)
    scores, stream.scored = _scores(output, stream), stream.scored or bool(output.prompt_logprobs)
    entries = choice.logprobs or ()
    return GenerationDelta(
        token_ids=tuple(choice.token_ids),
        logprobs=tuple(entry[token].logprob for token, entry in zip(choice.token_ids, entries, strict=bool(entries))),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        cached_prompt_tokens=output.num_cached_tokens or 0,
        prompt_logprobs=scores,
        engine_spans=_spans(choice),
        sampling_masks=_masks(choice),
        routed_experts=_routed(output, stream.count + len(choice.token_ids), stream.first_routed),
    )


def _native_delta(output: Any, stream: Stream) -> GenerationDelta:
    """What borders and spans need; the rest is in vLLM's own output."""
    choice = output.outputs[0]
    finish_reason, stop_reason = ending(choice.finish_reason, choice.stop_reason)
    return GenerationDelta(
        token_ids=tuple(choice.token_ids),
        logprobs=(),
        finish_reason=finish_reason,
        stop_reason=stop_reason,
        engine_spans=_spans(choice),
        native=output,
    )


def _spans(choice: Any) -> tuple[tuple[str, int, int], ...]:
    return tuple((s.version, s.start, s.end) for s in choice.weight_versions or ())


def _masks(choice: Any) -> tuple[tuple[int, ...], ...]:
    """One for each token of the delta, or none."""
    masks = () if choice.sampling_mask is None else choice.sampling_mask.token_ids
    return tuple(map(tuple, masks)) if len(masks) == len(choice.token_ids) else ()


def _routed(output: Any, sampled: int, first: int) -> RoutedExperts | None:
    """What vLLM gives for every token but the sample's last. None where it gives more or less: nobody could tell whose
    is whose."""
    rows = output.outputs[0].routed_experts
    if rows is None or len(rows) != len(output.prompt_token_ids) + sampled - 1 - first:
        return None
    return RoutedExperts(first, rows.shape[1], rows.shape[2], rows.astype("<u2").tobytes())


def _scores(output: Any, stream: Stream) -> tuple[float, ...]:
    """The prompt's logprobs, once. One that vLLM left out is not a number, so that nobody takes it for one."""
    if stream.scored or not output.prompt_logprobs:
        return ()
    pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
    return tuple(entry[token].logprob if entry and token in entry else math.nan for token, entry in pairs)


def sampling_params(sampling: SamplingSettings, *, tokenizer: bool) -> Any:
    """vLLM's object: deltas of token ids; no text is made but where a stop string is looked for. `tokenizer`: the
    engine has one.

    Raises InvalidRequest: what vLLM refuses, in its words, and what it would forget without a tokenizer.
    """
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    extra = checked_extra(sampling.extra, tokenizer=tokenizer)
    try:
        return SamplingParams(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=sampling.seed,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
            min_tokens=sampling.min_tokens,
            logprobs=sampling.logprobs,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            prompt_logprobs=0 if sampling.prompt_logprobs else None,
            detokenize=bool(extra.get("stop")),
            output_kind=RequestOutputKind.DELTA,
            **extra,
        )
    except (VLLMClientError, ValueError) as error:
        raise InvalidRequest("sampling", str(error)) from error


def checked_extra(given: Mapping[str, Any], *, tokenizer: bool) -> dict[str, Any]:
    """Fields by vLLM's names, in vLLM's types. Raises InvalidRequest for a name or a value that vLLM does not have, and
    for what it would not do without a tokenizer."""
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import SamplingParams

    hints = typing.get_type_hints(SamplingParams) if given else {}
    out = {}
    for name, value in given.items():
        field = f"sampling.extra.{name}"
        if name not in hints or name.startswith("_"):
            raise InvalidRequest(field, "vLLM's SamplingParams has no such field")
        if name in NEED_A_TOKENIZER and value and not tokenizer:
            raise InvalidRequest(field, "the engine has no tokenizer loaded (load_tokenizer), and looks at no text")
        try:
            out[name] = msgspec.convert(value, hints[name], strict=False)
        except (msgspec.ValidationError, VLLMClientError, TypeError, ValueError) as error:
            raise InvalidRequest(field, str(error)) from error
    return out
