"""vLLM's own API app behind the real door and over the real engine client; only the engine core is not there.

Configuration, tokenizer, templates, serving and routes are vLLM's; tokens come from an in-memory engine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from controlplane.core import engine_events as events
from controlplane.core.errors import EngineDied
from controlplane.core.versions import Term, UpdateId, WeightVersion
from engine_agent.life.engine_life import EngineLife, EngineLifeHolder
from engine_agent.memory.engine import MemorySettings
from engine_agent.openai_door.answers import App
from engine_agent.openai_door.api_app import api_app
from engine_agent.openai_door.running import RunningDoor
from engine_agent.openai_door.settings import OpenAiSettings
from engine_agent.vllm.settings import VllmSettings, engine_arguments
from tests.support.door_app import NativeMemoryEngine
from tests.support.engine_life import UPDATE, VERSION, commit, started
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.hf_models import VOCAB, save_random
from tests.support.text_model import add_tokenizer

MESSAGES: Any = [{"role": "user", "content": "hello"}]
LONG: dict[str, Any] = {"model": "policy", "messages": MESSAGES, "max_tokens": 400}
SOME = 5
"""Tokens of a sample that is in its middle."""


@cache
def parts_of_vllm(model: Path) -> SimpleNamespace:
    """What AsyncLLM has beside its core."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.renderers.registry import renderer_from_config
    from vllm.v1.engine.input_processor import InputProcessor

    limits: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 32 << 20}
    arguments = engine_arguments(VllmSettings(model, load_tokenizer=True, **limits), gpu=False)
    config = AsyncEngineArgs(**arguments).create_engine_config()
    renderer = renderer_from_config(config)
    processor = InputProcessor(config, renderer)
    parts = {"vllm_config": config, "model_config": config.model_config, "input_processor": processor}
    return SimpleNamespace(renderer=renderer, errored=False, dead_error=None, is_tracing_enabled=_no, **parts)


async def _no() -> bool:
    return False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("app") / "model"
    shape: dict[str, Any] = {"num_hidden_layers": 1, "head_dim": 32, "max_position_embeddings": 512}
    return add_tokenizer(save_random(directory, "llama", tied=True, **shape), VOCAB)


class World:
    def __init__(self, life: EngineLife, url: str) -> None:
        self.life = life
        self.http = httpx.AsyncClient(base_url=url, timeout=PATIENCE_SECONDS)
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_SECONDS)


@asynccontextmanager
async def opened(model: Path, tmp_path: Path, **more: Any) -> AsyncIterator[World]:
    engine: Any = NativeMemoryEngine(MemorySettings(vocab_size=VOCAB, seconds_per_token=0.005), "e0")
    engine.llm = parts_of_vllm(model)
    life, holder = await started(tmp_path, engine), EngineLifeHolder()
    holder.life = life
    settings = OpenAiSettings("127.0.0.1:0", wait_seconds=0.5, arguments=more)

    async def build(life: EngineLife) -> App:
        return await api_app(life, engine, settings)

    door = RunningDoor(holder, settings, build)
    try:
        async with door.open_for(life):
            commit(life, 1)
            await asyncio.wait_for(life.installs.outcome(UPDATE), PATIENCE_SECONDS)
            life.apply(events.FleetChanged(Term(1), Term(1), frozenset({VERSION})))
            await eventually(lambda: life.open)
            world = World(life, door.url)
            yield world
            await world.http.aclose()
    finally:
        await door.stop()
        await life.end("done")


@pytest.fixture
async def world(model: Path, tmp_path: Path) -> AsyncIterator[World]:
    async with opened(model, tmp_path) as world:
        yield world


def _made(world: World, count: int) -> bool:
    """Its one request has so many tokens."""
    engine = world.life.engine
    assert isinstance(engine, NativeMemoryEngine)
    return [live.seen >= count for live in engine._live.values()] == [True]


async def test_openais_client_chats_whole_and_in_a_stream(world: World) -> None:
    raw = await world.client.chat.completions.with_raw_response.create(
        model="policy", messages=MESSAGES, max_tokens=5, n=2, logprobs=True
    )
    answer = json.loads(raw.text)
    assert [len(c["logprobs"]["content"]) for c in answer["choices"]] == [5, 5]
    assert (raw.headers["x-weightplane-version"], raw.headers["x-weightplane-spans"]) == ("1", "1:0-5;1:0-5")
    stream = await world.client.chat.completions.create(model="policy", messages=MESSAGES, max_tokens=5, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("stream", [False, True])
async def test_inv11_poison_ends_an_answer_of_vllms_app_with_the_tokens_it_has(world: World, *, stream: bool) -> None:
    asking = asyncio.create_task(world.http.post("/v1/chat/completions", json=LONG | {"stream": stream}))
    await eventually(lambda: _made(world, SOME))
    world.life.apply(events.SpansDisagreed("by a test"))
    answer = await asking
    assert (answer.status_code, answer.headers["x-weightplane-version"]) == (200, "1")
    assert '"finish_reason":"abort"' in answer.text
    again = await world.http.post("/v1/chat/completions", json=LONG | {"stream": stream})
    assert (again.status_code, again.headers["x-weightplane-reason"]) == (503, "ENGINE_POISONED")


async def test_inv11_a_stream_of_vllms_app_over_an_update_tells_its_tokens_apart(world: World) -> None:
    newer = WeightVersion(2, Term(1))
    asking = asyncio.create_task(world.http.post("/v1/chat/completions", json=LONG | {"stream": True}))
    await eventually(lambda: _made(world, SOME))
    commit(world.life, 2, newer)
    await asyncio.wait_for(world.life.installs.outcome(UpdateId("u2")), PATIENCE_SECONDS)
    world.life.apply(events.FleetChanged(Term(1), Term(1), frozenset({newer})))
    answer = await asking
    lines = [line for line in answer.text.splitlines() if line]
    first, second = lines[-2].removeprefix(": x-weightplane-spans ").split(",")
    border = int(first.rpartition("-")[2])
    assert (first, second, lines[-1]) == (f"1:0-{border}", f"2:{border}-400", "data: [DONE]")
    assert answer.headers["x-weightplane-version"] == "1"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_caller_that_leaves_vllms_app_leaves_nothing_in_the_engine(world: World, *, stream: bool) -> None:
    asking = asyncio.create_task(world.http.post("/v1/chat/completions", json=LONG | {"stream": stream}))
    await eventually(lambda: len(world.life.requests) == 1)
    asking.cancel()
    await eventually(lambda: len(world.life.requests) == 0)


async def test_session_and_priority_reach_the_engine(world: World) -> None:
    headers = {"x-session-id": "one", "x-vllm-priority": "3"}
    body = {"model": "policy", "prompt": "ab", "max_tokens": 2}
    assert (await world.http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    engine = world.life.engine
    assert isinstance(engine, NativeMemoryEngine)
    ((_, how),) = engine.seen
    assert (how["session_id"], how["priority"]) == ("one", 3)


@pytest.mark.parametrize("path", ["/sleep", "/pause", "/collective_rpc", "/v1/load_lora_adapter", "/openapi.json"])
async def test_what_changes_an_engine_is_not_reached(world: World, path: str) -> None:
    assert {(await world.http.request(method, path)).status_code for method in ("GET", "POST")} == {404}


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ({"prompt": [VOCAB + 7]}, 400),
        ({"prompt": "ab", "stop_token_ids": [VOCAB]}, 400),
        ({"prompt": "ab", "n": 4000}, 400),
        ({"prompt": "ab", "use_beam_search": True}, 400),
        ({"prompt": "ab", "model": "another"}, 404),
    ],
)
async def test_what_is_wrong_is_said_by_its_status(world: World, wrong: Any, status: int) -> None:
    answer = await world.http.post("/v1/completions", json={"model": "policy", "max_tokens": 3} | wrong)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, status)


async def test_what_only_reads_is_there_with_the_gate_shut_too(world: World) -> None:
    world.life.apply(events.SpansDisagreed("by a test"))
    assert [m.id async for m in world.client.models.list()] == ["policy"]
    answer = await world.http.post("/tokenize", json={"model": "policy", "prompt": "ab"})
    assert answer.json()["count"] == 2


async def test_an_api_key_of_vllms_is_asked_for(model: Path, tmp_path: Path) -> None:
    async with opened(model, tmp_path, api_key=["secret"]) as world:
        body = {"model": "policy", "prompt": "ab", "max_tokens": 2}
        assert (await world.http.post("/v1/completions", json=body)).status_code == 401
        headers = {"authorization": "Bearer secret"}
        assert (await world.http.post("/v1/completions", json=body, headers=headers)).status_code == 200


async def test_an_argument_that_vllms_server_does_not_have_is_no_door(model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineDied, match="no argument chat_tenplate"):
        async with opened(model, tmp_path, chat_tenplate="x"):
            pass
