"""A life whose in-memory engine speaks vLLM's words, and an app over its engine client.

The app does with it what vLLM's does: one answer, or a stream of events. Client, life and door are the real ones.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from types import SimpleNamespace
from typing import Any

from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from controlplane.core.sampling import SamplingSettings
from engine_agent.engine import GenerationDelta
from engine_agent.life.engine_life import EngineLife
from engine_agent.memory.engine import MemoryEngine
from engine_agent.openai_door.answers import App, Receive, Scope, Send
from engine_agent.openai_door.engine_client import GatedEngineClient


class NativeMemoryEngine(MemoryEngine):
    """Each delta has vLLM's output beside it; text is the tokens' numbers."""

    seen: tuple[Any, ...] = ()
    """Parameters of the requests that it was given."""
    llm = SimpleNamespace(
        vllm_config=None, model_config=None, renderer=None, input_processor=None, errored=False, dead_error=None
    )

    async def generate_native(
        self, request_id: str, prompt: Mapping[str, Any], params: SamplingParams, how: Mapping[str, Any]
    ) -> AsyncGenerator[GenerationDelta, None]:
        self.seen += ((params, dict(how)),)
        plain = SamplingSettings(max_tokens=params.max_tokens or 16)
        async for delta in self.generate(request_id, prompt["prompt_token_ids"], plain):
            text = "".join(f"{token}," for token in delta.token_ids)
            wanted = params.logprobs is not None
            likely = [{t: Logprob(p)} for t, p in zip(delta.token_ids, delta.logprobs, strict=True)] if wanted else None
            choice = CompletionOutput(0, text, list(delta.token_ids), None, likely, finish_reason=delta.finish_reason)
            native = RequestOutput(request_id, None, prompt["prompt_token_ids"], None, [choice], finished=False)
            yield GenerationDelta(
                delta.token_ids, (), delta.finish_reason, engine_spans=delta.engine_spans, native=native
            )


def client_of(life: EngineLife) -> GatedEngineClient:
    return GatedEngineClient(life, life.engine)  # type: ignore[arg-type]


async def app_over(life: EngineLife) -> App:
    client = client_of(life)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        asked = json.loads((await receive())["body"] or "{}")
        kind = RequestOutputKind.DELTA if asked.get("stream") else RequestOutputKind.FINAL_ONLY
        params = SamplingParams(
            max_tokens=asked.get("max_tokens", 4), n=asked.get("n", 1), seed=asked.get("seed"), output_kind=kind
        )
        try:
            outputs = client.generate({"prompt_token_ids": asked["prompt"]}, params, "r", session_id="s")
            await (_stream if asked.get("stream") else _answer)(outputs, send)
        except Exception as error:  # as vLLM's handlers do: any error is an answer of theirs
            await _whole(send, 500, {"error": repr(error)})

    return app


async def _answer(outputs: AsyncGenerator[RequestOutput, None], send: Send) -> None:
    last = [output async for output in outputs][-1]
    choices = [{"index": c.index, "text": c.text, "finish_reason": c.finish_reason} for c in last.outputs]
    await _whole(send, 200, {"choices": choices})


async def _whole(send: Send, status: int, said: Any) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(said).encode()})


async def _stream(outputs: AsyncGenerator[RequestOutput, None], send: Send) -> None:
    """The head goes before anything is generated, as with Starlette."""
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    try:
        async for output in outputs:
            said = {"text": output.outputs[0].text, "index": output.outputs[0].index}
            await _event(send, json.dumps(said))
    except Exception as error:
        await _event(send, json.dumps({"error": repr(error)}))
    await _event(send, "[DONE]")
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _event(send: Send, text: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": True})
