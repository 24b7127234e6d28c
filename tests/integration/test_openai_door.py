"""The OpenAI-compatible door of a real vLLM engine, asked by OpenAI's own client, over updates by a real rank."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from controlplane.core.sampling import SamplingSettings
from controlplane.rollout.client import RolloutClient
from engine_agent.daemon.agent import run_engine
from engine_agent.daemon.settings import EngineSettings
from engine_agent.openai_door.settings import OpenAiSettings
from engine_agent.vllm.settings import VllmSettings
from tests.support.eventually import eventually
from tests.support.hf_models import VOCAB, save_random
from tests.support.local_fleet import RUN, LocalFleet
from tests.support.ports import free_port
from tests.support.samples import greedy
from tests.support.text_model import add_tokenizer, ids_of, word_of
from tests.support.told_rank import Order
from tests.support.toy_trainer import RankProcess, toy_trainer
from tests.support.vllm_router import vllm_router
from weightplane.v1 import lifecycle_pb2, lifecycle_pb2_grpc

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(400),
]

START_SECONDS = 240.0
WAIT_SECONDS = 3.0
SAID = "hello"
MESSAGES: Any = [{"role": "user", "content": SAID}]
COUNT = 12
LONG = 400


@dataclass
class Rig:
    """One engine with a door, a router that is told of it, and a rank that pushes."""

    fleet: LocalFleet
    rank: RankProcess
    http: httpx.AsyncClient
    client: openai.AsyncOpenAI
    router: str

    async def pushed(self, order: Order) -> int:
        ended = len(self.ends)
        assert self.rank.process.stdin is not None
        self.rank.process.stdin.write(json.dumps(asdict(order)).encode() + b"\n")
        await eventually(lambda: len(self.ends) > ended, within=180)
        assert self.ends[-1]["event"] == "pushed", self.ends[-1]
        return int(self.ends[-1]["number"])

    @property
    def ends(self) -> list[dict[str, Any]]:
        return [line for line in self.rank.lines if line["event"] in ("pushed", "failed")]

    async def chat(self, **more: Any) -> tuple[list[int], httpx.Headers]:
        """Greedy tokens, and the headers."""
        wanted: Any = {"return_token_ids": True, "ignore_eos": True}
        raw = await self.client.chat.completions.with_raw_response.create(
            model="policy", messages=MESSAGES, max_tokens=COUNT, temperature=0, extra_body=wanted, **more
        )
        (choice,) = json.loads(raw.text)["choices"]
        return choice["token_ids"], raw.headers

    async def lifecycle(self, name: str, **fields: Any) -> Any:
        view = await self.fleet.engine("e0")
        stub = lifecycle_pb2_grpc.LifecycleStub(self.fleet.channel(view.endpoint))
        request = getattr(lifecycle_pb2, f"{name}Request")(run_id=RUN, engine=view.status.engine, owner="ann", **fields)
        return await getattr(stub, name)(request, timeout=20)

    async def live_requests(self) -> int:
        return (await self.fleet.status("e0")).live_requests


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    work = tmp_path_factory.mktemp("door")
    model = save_random(
        work / "model", "llama", tied=True, num_hidden_layers=2, head_dim=32, max_position_embeddings=512
    )
    add_tokenizer(model, VOCAB)
    fleet, door = LocalFleet(work), f"127.0.0.1:{free_port()}"
    with vllm_router() as at:
        try:
            await fleet.start_coordinator(lease_ttl_seconds=20.0)
            vllm = VllmSettings(model, dtype="float32", max_model_len=512, kv_cache_memory_bytes=32 << 20)
            asked = OpenAiSettings(door, wait_seconds=WAIT_SECONDS, router=at)
            settings = EngineSettings("e0", fleet.address, RUN, state_dir=work / "engines", vllm=vllm, openai=asked)
            fleet._start("e0", run_engine, settings)
            async with toy_trainer(fleet.address) as trainer, httpx.AsyncClient(base_url=f"http://{door}") as http:
                (rank,) = await trainer.run_ranks(["tests.support.told_rank", str(model)], world=1)
                await eventually(lambda: _knows(fleet), within=START_SECONDS)
                client = openai.AsyncOpenAI(base_url=f"http://{door}/v1", api_key="none", max_retries=0, timeout=60)
                yield Rig(fleet, rank, http, client, at)
        finally:
            await fleet.close()


async def _knows(fleet: LocalFleet) -> bool:
    return any(engine.known for engine in (await fleet.view()).engines)


async def test_before_the_first_version_the_door_says_503_and_why(rig: Rig) -> None:
    assert (await rig.http.get("/health")).status_code == 503
    assert [m.id async for m in rig.client.models.list()] == ["policy"]
    with pytest.raises(openai.InternalServerError) as raised:
        await rig.chat()
    assert raised.value.status_code == 503
    assert raised.value.response.headers["retry-after"]
    assert raised.value.response.headers["x-weightplane-reason"] == "ENGINE_NOT_READY"


async def test_a_chat_says_which_version_answered_before_an_update_and_after_it(rig: Rig) -> None:
    said = []
    for seed in (1, 2):
        number = await rig.pushed(Order(seed))
        tokens, headers = await rig.chat()
        assert headers["x-weightplane-version"] == str(number)
        assert headers["x-weightplane-spans"] == f"{number}:0-{COUNT}"
        assert (tokens, [(number, 0, COUNT)]) == await greedy(rig.fleet, "e0", ids_of(SAID), COUNT)
        said.append(tokens)
    assert said[0] != said[1], "neighbouring versions must differ, or nothing was proven"
    assert (await rig.http.get("/health")).status_code == 200


async def test_n_samples_and_several_prompts_have_their_spans_in_order(rig: Rig) -> None:
    number = await rig.pushed(Order(3))
    raw = await rig.client.completions.with_raw_response.create(
        model="policy", prompt=["ab", "cd"], n=2, max_tokens=5, seed=7, extra_body={"ignore_eos": True}
    )
    choices = json.loads(raw.text)["choices"]
    assert [c["index"] for c in choices] == [0, 1, 2, 3]
    assert all(c["finish_reason"] == "length" for c in choices)
    assert raw.headers["x-weightplane-spans"] == ";".join([f"{number}:0-5"] * 4)
    again = await rig.client.completions.create(
        model="policy", prompt="ab", n=2, max_tokens=5, seed=7, extra_body={"ignore_eos": True}
    )
    assert [c.text for c in again.choices] == [c["text"] for c in choices[:2]]


async def test_a_rollout_of_token_ids_ends_at_a_stop_string_too(rig: Rig) -> None:
    """The string lies over two tokens; the sample has both, and its span."""
    number = await rig.pushed(Order(6))
    async with RolloutClient(rig.fleet.address, run_id=RUN, wait_seconds=60) as rollouts:
        plain = SamplingSettings(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
        whole = (await rollouts.generate(ids_of(SAID), plain)).tokens
        words = [word_of(token) for token in whole]
        stop = words[4] + words[5]
        ends = next(end for end in range(len(words) + 1) if stop in "".join(words[:end]))
        sample = await rollouts.generate(ids_of(SAID), replace(plain, extra={"stop": [stop]}))
    assert (sample.tokens, sample.finish_reason, sample.stop_reason) == (whole[:ends], "stop", stop)
    assert ends < COUNT
    assert [(s.version.number, s.start, s.end) for s in sample.spans] == [(number, 0, ends)]
    assert len(sample.logprobs) == ends


async def streamed(rig: Rig) -> tuple[str, str, list[str]]:
    """A long sample: the version in the head, the spans at the end, and all lines."""
    body = {"model": "policy", "messages": MESSAGES, "max_tokens": LONG, "stream": True, "ignore_eos": True}
    async with rig.http.stream("POST", "/v1/chat/completions", json=body, timeout=90) as answer:
        assert "x-weightplane-spans" not in answer.headers
        lines = [line async for line in answer.aiter_lines() if line]
    (spans,) = [line.split()[-1] for line in lines if line.startswith(": x-weightplane-spans ")]
    return answer.headers["x-weightplane-version"], spans, lines


async def test_inv11_a_stream_over_an_update_says_which_version_made_which_tokens(rig: Rig) -> None:
    """Several run all the time, so that some are always cut by it."""
    before = await rig.pushed(Order(4))
    pushing = asyncio.create_task(rig.pushed(Order(5)))

    async def again_and_again() -> list[tuple[str, str, list[str]]]:
        made = [await streamed(rig)]
        while not pushing.done():
            made.append(await streamed(rig))
        return made

    each = [one for made in await asyncio.gather(*(again_and_again() for _ in range(4))) for one in made]
    after = await pushing
    assert all(lines[-1] == "data: [DONE]" for _, _, lines in each)
    over = [(head, *spans.split(",")) for head, spans, _ in each if "," in spans]
    assert over, [spans for _, spans, _ in each]
    for head, first, second in over:
        border = int(first.rpartition("-")[2])
        assert (head, first, second) == (str(before), f"{before}:0-{border}", f"{after}:{border}-{LONG}")


async def test_a_request_waits_outside_a_shut_gate_and_gets_the_version_that_opens_it(rig: Rig) -> None:
    number = await rig.pushed(Order(6))
    await rig.lifecycle("PauseGeneration")
    with pytest.raises(openai.InternalServerError) as raised:
        await rig.chat()
    assert raised.value.response.headers["x-weightplane-reason"] == "ENGINE_NOT_READY"
    waiting = asyncio.create_task(rig.chat())
    assert (await rig.http.get("/health")).status_code == 503
    assert not waiting.done()
    await rig.lifecycle("ResumeGeneration")
    assert (await waiting)[1]["x-weightplane-version"] == str(number)


async def test_a_caller_that_goes_away_leaves_nothing_running(rig: Rig) -> None:
    body = {"model": "policy", "messages": MESSAGES, "max_tokens": LONG, "stream": True, "ignore_eos": True}
    async with rig.http.stream("POST", "/v1/chat/completions", json=body, timeout=30) as answer:
        await anext(answer.aiter_lines())
    await eventually(lambda: _idle(rig))
    with pytest.raises(httpx.ReadTimeout):
        await rig.http.post("/v1/chat/completions", json=body | {"stream": False}, timeout=0.3)
    await eventually(lambda: _idle(rig))


async def _idle(rig: Rig) -> bool:
    return await rig.live_requests() == 0


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/sleep"),
        ("POST", "/pause"),
        ("POST", "/collective_rpc"),
        ("POST", "/update_weights"),
        ("POST", "/reset_prefix_cache"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/inference/v1/generate"),
        ("POST", "/scale_elastic_ep"),
        ("GET", "/server_info"),
        ("GET", "/openapi.json"),
    ],
)
async def test_what_changes_an_engine_is_not_reached(rig: Rig, method: str, path: str) -> None:
    assert (await rig.http.request(method, path)).status_code == 404


@pytest.mark.parametrize(
    "wrong", [{"prompt": [VOCAB + 7]}, {"prompt": "ab", "use_beam_search": True, "n": 2}, {"prompt": "ab", "n": 4000}]
)
async def test_what_an_engine_would_die_of_or_nobody_could_attribute_is_refused(rig: Rig, wrong: Any) -> None:
    answer = await rig.http.post("/v1/completions", json={"model": "policy", "max_tokens": 3, **wrong})
    assert answer.status_code == 400, answer.text
    assert (await rig.fleet.status("e0")).gate_open


async def test_a_router_has_the_door_exactly_while_the_gate_is_open(rig: Rig) -> None:
    number = await rig.pushed(Order(8))
    async with httpx.AsyncClient(base_url=rig.router) as http:

        async def listed() -> int:
            return len((await http.get("/list_workers")).json()["urls"])

        async def one() -> bool:
            return await listed() == 1

        async def none() -> bool:
            return await listed() == 0

        await eventually(one, within=20)
        through = openai.AsyncOpenAI(base_url=f"{rig.router}/v1", api_key="none", max_retries=0, timeout=30)
        raw = await through.chat.completions.with_raw_response.create(
            model="policy", messages=MESSAGES, max_tokens=3, extra_headers={"x-session-id": "one"}
        )
        assert raw.headers["x-weightplane-version"] == str(number)
        await rig.lifecycle("PauseGeneration")
        await eventually(none, within=20)
        await rig.lifecycle("ResumeGeneration")
        await eventually(one, within=20)
