"""Tokens of a server that the agent did not start: spans, standing still, refusals and the canary. No vLLM here:
the contract suite and tests/e2e/test_external_real.py have the real one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from controlplane.core.errors import CanaryFailed, DeadlineExceeded, EngineDied, InvalidRequest, RequestAborted
from controlplane.core.sampling import SamplingSettings
from engine_agent.engine import GenerationDelta
from engine_agent.vllm.canary import DECODED_TOKENS, PROMPT_TOKENS
from tests.support.eventually import eventually
from tests.support.external_engine import consume, put, shorten
from tests.support.recording_server import RecordingServer


async def test_inv11_spans_carry_this_agent_s_labels_and_another_s_equal_no_version(
    server: RecordingServer, attach: Any
) -> None:
    engine = await attach()
    await put(engine, "7")
    await engine.resume()
    running = asyncio.create_task(consume(engine, "r1"))
    await eventually(lambda: "r1" in server.streams)
    server.say("r1", 5, 6)
    ours, foreign = (server.label, 0, 2), ("7", 2, 3)
    server.say("r1", 9, finish_reason="length", weight_versions=server.spans(ours, foreign))
    deltas = await running
    assert [t for d in deltas for t in d.token_ids] == [5, 6, 9]
    assert deltas[-1].engine_spans == (("7", 0, 2), ("7", 2, 3))
    (body,) = server.posted("/inference/v1/generate")[-1:]
    assert (body["token_ids"], body["cache_salt"]) == ([1, 2, 3], server.label)


async def test_inv11_standing_still_waits_until_every_token_that_the_server_handed_on_has_come(
    server: RecordingServer, attach: Any
) -> None:
    engine = await attach()
    await put(engine, "7")
    await engine.resume()
    deltas: list[GenerationDelta] = []
    running = asyncio.create_task(consume(engine, "r1", deltas))
    await eventually(lambda: "r1" in server.streams)
    server.say("r1", 5)
    await eventually(lambda: len(deltas) == 1)
    server.out["r1"] = 2  # one more is out, and still on its way
    quiescing = asyncio.create_task(engine.quiesce())
    await eventually(lambda: server.paused)
    await asyncio.sleep(0.05)
    assert not quiescing.done()
    server.out["r1"] = 1
    server.say("r1", 6)
    assert (await quiescing).token_counts == {"r1": 2}
    assert len(deltas) == 2
    running.cancel()


async def test_a_hand_over_that_does_not_end_is_no_standing_still(server: RecordingServer, attach: Any) -> None:
    engine = await attach()
    running = asyncio.create_task(consume(engine, "r1"))
    await eventually(lambda: "r1" in server.out)
    server.out["r1"] = 2
    shorten(engine, call_timeout_seconds=0.3)
    with pytest.raises(DeadlineExceeded):
        await engine.quiesce()
    running.cancel()


async def test_where_the_server_has_no_routes_of_ours_requests_end_with_their_tokens_instead_of_being_kept(
    server: RecordingServer, attach: Any
) -> None:
    server.plugin = False
    engine = await attach()
    await put(engine, "7")
    await engine.resume()
    running = asyncio.create_task(consume(engine, "r1"))
    await eventually(lambda: "r1" in server.out)
    server.say("r1", 5)
    assert (await engine.quiesce()).token_counts == {}
    deltas = await running
    assert [t for d in deltas for t in d.token_ids] == [5]
    assert deltas[-1].finish_reason == "abort"


async def test_what_the_server_refuses_is_its_caller_s_error_and_what_it_breaks_off_too(
    server: RecordingServer, attach: Any
) -> None:
    engine = await attach()
    server.refuse["/inference/v1/generate"] = 400
    with pytest.raises(InvalidRequest, match="was refused"):
        await consume(engine, "r1")
    server.refuse["/inference/v1/generate"] = 500
    with pytest.raises(RequestAborted):
        await consume(engine, "r2")
    server.refuse.clear()
    running = asyncio.create_task(consume(engine, "r3"))
    await eventually(lambda: "r3" in server.streams)
    server.streams["r3"].put_nowait({"error": {"message": "it broke"}})
    with pytest.raises(RequestAborted):
        await running
    await engine.probe()
    with pytest.raises(InvalidRequest, match="with max_tokens 1 only"):
        await anext(engine.generate("r4", [1, 2], SamplingSettings(max_tokens=2, prompt_logprobs=True)))


async def test_a_stop_string_is_looked_for_where_the_server_has_a_tokenizer(
    server: RecordingServer, attach: Any
) -> None:
    asked = SamplingSettings(max_tokens=2, extra={"stop": ["end"]})
    engine = await attach()
    running = asyncio.ensure_future(anext(engine.generate("r1", [1, 2], asked)))
    await eventually(lambda: "r1" in server.streams)
    running.cancel()
    params = server.posted("/inference/v1/generate")[-1]["sampling_params"]
    assert (params["stop"], params["detokenize"]) == (["end"], True)
    server.config["model_config"]["skip_tokenizer_init"] = True
    without = await attach()
    with pytest.raises(InvalidRequest, match=r"sampling\.extra\.stop: the engine has no tokenizer loaded"):
        await anext(without.generate("r2", [1, 2], asked))
    running = asyncio.ensure_future(consume(without, "r3"))
    await eventually(lambda: "r3" in server.streams)
    running.cancel()
    assert not server.posted("/inference/v1/generate")[-1]["sampling_params"]["detokenize"]


async def test_a_stream_that_ends_without_a_reason_ends_this_life(server: RecordingServer, attach: Any) -> None:
    engine = await attach()
    running = asyncio.create_task(consume(engine, "r1"))
    await eventually(lambda: "r1" in server.streams)
    server.streams["r1"].put_nowait(None)
    with pytest.raises(EngineDied, match="without a reason"):
        await running


@pytest.mark.parametrize("floor", [-9999.0, None])
async def test_a_canary_whose_numbers_vllm_replaced_is_silent(
    server: RecordingServer, attach: Any, floor: float | None
) -> None:
    engine = await attach()
    await put(engine, "7")

    async def answer() -> None:
        await eventually(lambda: bool(server.streams))
        (name,) = server.streams
        prompt = server.posted("/inference/v1/generate")[-1]["token_ids"]
        scored = [None, *({str(t): {"logprob": -1.0}} for t in prompt[1:])]
        entries = [{"logprob": -1.0}] * (DECODED_TOKENS - 1) + [{"logprob": floor}]
        choice = {"token_ids": list(range(DECODED_TOKENS)), "logprobs": {"content": entries}}
        server.out.pop(name)
        server.streams[name].put_nowait({"choices": [choice], "prompt_logprobs": scored})

    answering = asyncio.create_task(answer())
    with pytest.raises(CanaryFailed, match=f"1 of {PROMPT_TOKENS - 1 + DECODED_TOKENS} logprobs are not finite"):
        await engine.canary()
    await answering
    assert server.paused
