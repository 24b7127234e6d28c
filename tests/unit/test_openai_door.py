"""The OpenAI door without a model: the real door, engine client and life, over an engine that speaks vLLM's words."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllm.engine.protocol import EngineClient

from controlplane.config import ConfigError, load_values
from controlplane.core import engine_events as events
from controlplane.core import errors as e
from controlplane.core.traces import SpanRef
from controlplane.core.versions import Term, UpdateId, WeightVersion
from controlplane.rpc.ports import PortUnavailable
from controlplane.rpc.security import PLAIN
from engine_agent.daemon.settings import EngineSettings
from engine_agent.life.engine_life import EngineLifeHolder
from engine_agent.openai_door.engine_client import GatedEngineClient
from engine_agent.openai_door.running import RunningDoor
from engine_agent.openai_door.settings import OpenAiSettings
from tests.support.door_app import app_over, client_of
from tests.support.door_world import CHAT, SETTINGS, World, made
from tests.support.engine_life import commit
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.otlp_collector import kept_spans

NEWER = WeightVersion(2, Term(1))
SLOW = 0.005


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = await made(tmp_path, seconds_per_token=SLOW)
    yield world
    await world.http.aclose()
    await world.life.end("done")


async def test_an_answer_names_the_version_that_made_it(world: World) -> None:
    answer = await world.ask()
    assert answer.status_code == 200
    assert answer.headers["x-weightplane-version"] == "1"
    assert answer.headers["x-weightplane-spans"] == "1:0-4"
    (choice,) = answer.json()["choices"]
    assert (choice["finish_reason"], choice["text"].count(",")) == ("length", 4)


async def test_the_engine_is_asked_for_every_token_as_it_comes_whatever_the_app_wants(world: World) -> None:
    await world.ask(n=2, seed=5)
    kinds = [(p.n, p.seed, p.output_kind.name, p.stream_interval, how["session_id"]) for p, how in world.engine.seen]
    assert kinds == [(1, 5, "DELTA", None, "s"), (1, 6, "DELTA", None, "s")]


async def test_n_samples_come_as_one_answer_with_their_spans_in_order(world: World) -> None:
    answer = await world.ask(n=3)
    assert [c["index"] for c in answer.json()["choices"]] == [0, 1, 2]
    assert answer.headers["x-weightplane-spans"] == "1:0-4;1:0-4;1:0-4"


async def _update(world: World) -> None:
    commit(world.life, 2, NEWER)
    await asyncio.wait_for(world.life.installs.outcome(UpdateId("u2")), PATIENCE_SECONDS)


async def test_inv11_tokens_of_two_versions_are_told_apart_and_no_version_is_named_for_all(world: World) -> None:
    asking = asyncio.create_task(world.ask(max_tokens=60))
    await eventually(lambda: world.made(4))
    await _update(world)
    assert not asking.done()
    world.serve(NEWER)
    answer = await asking
    first, second = answer.headers["x-weightplane-spans"].split(",")
    border = int(first.rpartition("-")[2])
    assert (first, second) == (f"1:0-{border}", f"2:{border}-60")
    assert "x-weightplane-version" not in answer.headers


async def test_a_stream_names_its_first_version_before_and_all_of_them_after(world: World) -> None:
    asking = asyncio.create_task(world.ask(max_tokens=60, stream=True))
    await eventually(lambda: world.made(4))
    await _update(world)
    world.serve(NEWER)
    answer = await asking
    assert answer.headers["x-weightplane-version"] == "1"
    *_, comment, done, _end = answer.text.split("\n\n")
    assert comment.startswith(": x-weightplane-spans 1:0-")
    assert comment.endswith("-60")
    assert done == "data: [DONE]"


async def test_what_is_made_behind_a_shut_gate_waits_there(world: World) -> None:
    asking = asyncio.create_task(world.ask(max_tokens=60))
    await eventually(lambda: len(world.life.requests) == 1)
    world.hold(present=True)
    await eventually(lambda: not world.life.open)
    await asyncio.sleep(20 * SLOW)
    assert not asking.done()
    world.hold(present=False)
    assert (await asking).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_inv11_poison_ends_it_with_the_tokens_it_has(world: World, *, stream: bool) -> None:
    asking = asyncio.create_task(world.ask(max_tokens=200, stream=stream))
    await eventually(lambda: world.made(6))
    world.life.apply(events.SpansDisagreed("by a test"))
    answer = await asking
    assert answer.status_code == 200
    assert answer.headers["x-weightplane-version"] == "1"
    assert "x-weightplane-spans 1:0-" in answer.text or answer.headers["x-weightplane-spans"].startswith("1:0-")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_poisoned_engine_answers_503_with_the_reason(world: World, *, stream: bool) -> None:
    world.life.apply(events.SpansDisagreed("by a test"))
    answer = await world.ask(stream=stream)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.headers["x-weightplane-reason"] == answer.json()["error"]["type"] == "ENGINE_POISONED"
    assert (await world.http.get("/health")).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_poison_before_the_first_token_is_a_503_and_no_empty_answer(tmp_path: Path, *, stream: bool) -> None:
    world = await made(tmp_path, seconds_per_token=1.0)
    asking = asyncio.create_task(world.ask(stream=stream))
    await eventually(lambda: len(world.life.requests) == 1)
    world.life.apply(events.SpansDisagreed("by a test"))
    answer = await asking
    assert (answer.status_code, answer.headers["x-weightplane-reason"]) == (503, "ENGINE_POISONED")
    await world.life.end("done")


async def test_a_request_waits_outside_a_shut_gate_and_no_longer_than_it_may(world: World) -> None:
    world.hold(present=True)
    await eventually(lambda: not world.life.open)
    waiting = asyncio.create_task(world.ask())
    await eventually(lambda: world.life.counts.waiting == 1)
    assert not world.engine.seen
    world.hold(present=False)
    assert (await waiting).status_code == 200
    world.hold(present=True)
    await eventually(lambda: not world.life.open)
    answer = await world.ask()
    assert (answer.status_code, answer.headers["x-weightplane-reason"]) == (503, "ENGINE_NOT_READY")
    assert "operator" in answer.json()["error"]["message"]


async def test_the_gate_is_asked_once_more_where_the_request_goes_in(world: World) -> None:
    """The app takes its time between the door's look at the gate and the engine."""
    inner = await app_over(world.life)

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        world.hold(present=True)
        await eventually(lambda: not world.life.open)
        await inner(scope, receive, send)

    world.door._app = slow
    answer = await world.ask(stream=True)
    assert (answer.status_code, answer.headers["x-weightplane-reason"]) == (503, "ENGINE_NOT_READY")
    assert not world.engine.seen


async def test_an_engine_that_dies_is_a_503_and_a_life_without_an_app_too(world: World) -> None:
    asking = asyncio.create_task(world.ask(max_tokens=200))
    await eventually(lambda: len(world.life.requests) == 1)
    world.life.requests.fail_all(e.EngineDied(engine_id="e0", cause="by a test"))
    answer = await asking
    assert answer.status_code in (500, 503)
    world.door.shut()
    assert (await world.http.get("/v1/models")).status_code == 503
    assert (await world.ask()).status_code == 503


async def test_a_caller_that_goes_away_leaves_nothing_in_the_engine(world: World) -> None:
    """Driven by hand: its messages are a request and then a disconnect, whenever this says so."""
    sent: list[Any] = []
    left = asyncio.Event()
    body = json.dumps({"prompt": [1, 2], "max_tokens": 1000, "stream": True}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
    serving = asyncio.create_task(world.door(scope, receive, send))
    await eventually(lambda: len(sent) > 2)
    assert len(world.life.requests) == 1
    left.set()
    await asyncio.wait_for(serving, PATIENCE_SECONDS)
    assert len(world.life.requests) == 0


@pytest.mark.parametrize("path", ["/sleep", "/pause", "/v1/load_lora_adapter", "/metrics", "/health/"])
async def test_only_the_listed_routes_are_there(world: World, path: str) -> None:
    answer = await world.http.post(path, json={})
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "NOT_FOUND")


async def test_health_is_the_gate(world: World) -> None:
    assert (await world.http.get("/health")).status_code == 200
    world.hold(present=True)
    await eventually(lambda: not world.life.open)
    assert (await world.http.get("/health")).status_code == 503


async def test_there_is_a_limit_on_requests_on_bodies_and_on_samples(world: World) -> None:
    running = [asyncio.create_task(world.ask(max_tokens=50)) for _ in range(2)]
    await eventually(lambda: len(world.life.requests) == 2)
    answer = await world.ask()
    assert (answer.status_code, answer.headers["x-weightplane-reason"]) == (503, "LIMIT_EXCEEDED")
    await asyncio.gather(*running)
    assert (await world.ask(padding="x" * 2000)).status_code == 413
    assert (await world.ask(n=2000)).status_code == 400


@pytest.mark.parametrize("wrong", [{"prompt": [4000]}, {"use_beam_search": True}])
async def test_what_cannot_be_served_truly_is_refused(world: World, wrong: Any) -> None:
    answer = await world.ask(**wrong)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "INVALID_REQUEST")
    assert not world.engine.seen


async def test_inv2_nothing_that_changes_an_engine_goes_through_its_client(world: World) -> None:
    """Every method of vLLM's client is one that only reads, one that generates, or one that refuses."""
    reads = {"is_sleeping", "is_paused", "check_health", "is_tracing_enabled", "do_log_stats", "get_supported_tasks"}
    reads |= {"generate", "abort", "shutdown", "notify_kv_transfer_request_rejected"}
    reads |= {"check_admission", "get_kv_event_sources"}
    client = client_of(world.life)
    for name, method in inspect.getmembers(EngineClient, inspect.isfunction):
        if name in reads:
            continue
        arguments = [None] * (len(inspect.signature(getattr(client, name)).parameters) if name not in _refused() else 0)
        with pytest.raises((e.UnsupportedByEngine, NotImplementedError)):
            await getattr(client, name)(*arguments)
        assert method is not None


def _refused() -> set[str]:
    return {name for name, made in vars(GatedEngineClient).items() if getattr(made, "__name__", "") == "refuse"}


# ---- settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"listen": "8000"}, "HOST:PORT"),
        ({"listen": "127.0.0.1:1", "arguments": {"model": "x"}}, "may not set model"),
        ({"listen": "127.0.0.1:1", "wait_seconds": 0.0}, "above 0"),
    ],
)
def test_a_door_that_is_not_meant_so_is_refused(values: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_values(OpenAiSettings, values)


def test_a_door_needs_vllm() -> None:
    with pytest.raises(ConfigError, match="only vLLM"):
        load_values(EngineSettings, {"engine_id": "e", "backend": "memory", "openai": {"listen": "127.0.0.1:0"}})


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "localhost:0", "[::1]:0"])
def test_loopback_needs_no_word(listen: str) -> None:
    OpenAiSettings(listen).check_with(PLAIN, insecure=False)


def test_a_network_gets_no_door_without_tls_unless_it_is_said_to_be_insecure() -> None:
    for listen in ("0.0.0.0:8000", "engines.example:8000"):
        with pytest.raises(ValueError, match="other hosts reach"):
            OpenAiSettings(listen).check_with(PLAIN, insecure=False)
        with pytest.raises(ValueError, match="takes tokens from other hosts"):
            OpenAiSettings(listen, tokens=Path("tokens.toml")).check_with(PLAIN, insecure=True)
        OpenAiSettings(listen).check_with(PLAIN, insecure=True)


def test_a_key_of_vllms_own_and_tokens_of_ours_are_not_asked_for_together() -> None:
    both = OpenAiSettings("127.0.0.1:0", tokens=Path("tokens.toml"), arguments={"api_key": ["k"]})
    with pytest.raises(ValueError, match="leave it out"):
        both.check_with(PLAIN, insecure=False)


async def test_the_door_listens_answers_and_ends(world: World) -> None:
    holder = EngineLifeHolder()
    holder.life = world.life
    door = RunningDoor(holder, SETTINGS, app_over)
    with pytest.raises(PortUnavailable):
        RunningDoor(holder, OpenAiSettings(door.url.removeprefix("http://")), app_over)
    async with httpx.AsyncClient(base_url=door.url) as http:
        assert (await http.get("/health")).status_code == 503
        async with door.open_for(world.life):
            assert (await http.get("/health")).status_code == 200
            answer = await http.post(CHAT, json={"prompt": [1], "stream": True})
            assert answer.headers["x-weightplane-version"] == "1"
        assert (await http.get("/health")).status_code == 503
    await door.stop()


async def test_a_request_is_a_span_below_its_callers_and_a_refused_one_too(world: World) -> None:
    caller = SpanRef(0xABC, 0xDEF, True)
    with kept_spans() as kept:
        asked = {"prompt": [1, 2, 3], "n": 2}
        await world.http.post(CHAT, json=asked, headers={"traceparent": caller.traceparent})
        world.hold(present=True)
        await world.ask()
    whole, refused = kept.named("door Generate")
    assert whole.parent == caller
    assert whole.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert whole.attributes["weightplane.spans"] == ["1.1:0-4", "1.1:0-4"]
    assert whole.attributes["weightplane.outcome"] == "finished"
    assert refused.parent is None
    assert (refused.attributes["weightplane.outcome"], refused.error) == ("refused", "ENGINE_NOT_READY")
