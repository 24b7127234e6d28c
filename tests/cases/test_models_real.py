"""Failures in what models are (docs/cases.md, M1, M2, M4, M6, M7), on a real vLLM engine of a model with experts.

Its vocabulary is no multiple of anything, its head is tied to its embedding. A real trainer's rank pushes, well or
badly; what the engine then says is compared with fresh engines, or with transformers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import pytest
import pytest_asyncio

from controlplane.core.errors import DeadlineExceeded, VersionChanged
from controlplane.core.sampling import SamplingSettings
from controlplane.rollout.sample import Scores
from controlplane.rpc.errors import from_rpc_error
from tests.cases.samples import LiveSample
from tests.support.eventually import eventually
from tests.support.faulty_worker import CLASS, FAULTS, FILE_VARIABLE
from tests.support.hf_models import VOCAB, save_random
from tests.support.local_fleet import RUN
from tests.support.real_rig import (
    COUNT,
    FAILS_AFTER,
    LENGTH,
    PROMPT,
    RUNNING,
    Rig,
    Said,
    made_by,
    real_rig,
    thirty_two,
    watch,
)
from tests.support.reference import Reference
from tests.support.tiny_rank import EMBEDDING_NAME
from tests.support.told_rank import Order, weights
from weightplane.v1 import engine_pb2, lifecycle_pb2, lifecycle_pb2_grpc, pause_pb2, rollout_pb2, rollout_pb2_grpc

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Rig]:
    work = tmp_path_factory.mktemp("real")
    shape: dict[str, Any] = {
        "num_hidden_layers": 2,
        "head_dim": 32,
        "moe_intermediate_size": 64,
        "max_position_embeddings": 512,
    }
    model = save_random(work / "model", "qwen3_moe", tied=True, **shape)
    async with real_rig(work, model, CLASS, {FILE_VARIABLE: str(work / "fault")}) as rig:
        yield rig


async def refused(rig: Rig, order: Order) -> str:
    """The text with which a push is refused that must leave tokens, version and gate as they are."""
    number = await rig.pushed(Order(seed=1))
    before = await rig.says()
    end = await rig.push(order)
    assert (end["event"], end["reason"]) == ("failed", "UPDATE_FAILED")
    assert await rig.says() == before == (rig.truth(Order(seed=1)), [(number, 0, COUNT)])
    assert await rig.fleet.applied("e0") == number
    return str(end["text"])


async def test_M4_after_each_of_three_updates_an_engine_with_experts_equals_a_fresh_one(rig: Rig) -> None:
    said: list[Said] = []
    orders = [Order(seed) for seed in (11, 12, 13)]
    for order in orders:
        number = await rig.pushed(order)
        said.append(await rig.says())
        assert said[-1][1] == [(number, 0, COUNT)]
    assert len({tuple(tokens) for tokens, _ in said}) == 3, "neighbouring versions must differ, or nothing was proven"
    for order, (tokens, _) in zip(orders, said, strict=True):
        assert tokens == rig.truth(order)
    assert said[-1][0] == await rig.fresh_says(orders[-1])


async def test_M1_training_the_embedding_alone_changes_what_the_tied_head_says(rig: Rig) -> None:
    for seed in (21, 22, 23):
        order = Order(seed, only=EMBEDDING_NAME)
        await rig.pushed(order)
        assert (await rig.says())[0] == rig.truth(order)
    assert rig.truth(order) != rig.truth(Order(21, only=EMBEDDING_NAME))


@pytest.mark.parametrize(
    "without",
    [
        ["model.norm.weight"],
        ["model.layers.0.mlp.experts.3.down_proj.weight", "model.layers.0.mlp.gate.weight"],
    ],
)
async def test_M2_a_push_that_lacks_tensors_is_refused_by_name_and_the_old_version_serves_on(
    rig: Rig, without: Sequence[str]
) -> None:
    text = await refused(rig, Order(31, without=without))
    assert "MANIFEST_INCOMPLETE" in text
    assert all(name in text for name in without), text


async def test_M6_rows_of_padding_are_refused_and_without_them_the_vocabulary_fits(rig: Rig) -> None:
    padded = -(-VOCAB // 128) * 128
    text = await refused(rig, Order(41, rows=[(EMBEDDING_NAME, padded)]))
    assert f"SHAPE_MISMATCH: {EMBEDDING_NAME}: the engine expects shape ({VOCAB}, 64), got ({padded}, 64)" in text
    await rig.pushed(Order(41))
    assert (await rig.says())[0] == rig.truth(Order(41))


@pytest.mark.parametrize("rows", [95, 97])
async def test_M7_a_shape_that_differs_is_refused_with_both_and_the_old_version_serves_on(rig: Rig, rows: int) -> None:
    """vLLM itself cuts what is too large in silence."""
    name = "model.layers.1.mlp.gate_proj.weight"
    text = await refused(rig, Order(51, rows=[(name, rows)]))
    assert f"SHAPE_MISMATCH: {name}: the engine expects shape (96, 64), got ({rows}, 64)" in text


# ---- wrong weights that nobody refuses ----------------------------------------------------------

SCORED = (5, 60, 7, 81, 9, 33, 2)
TOLERANCE = 0.01


def with_reference(rig: Rig, order: Order) -> Order:
    """And what transformers says of its weights, as a trainer would."""
    logprobs = Reference(rig.written(order)).score({}, SCORED[:1], SCORED[1:])
    return replace(order, reference=(SCORED, logprobs, TOLERANCE))


@pytest.mark.parametrize("fault", FAULTS)
async def test_an_engine_that_put_in_something_else_is_found_by_the_trainers_own_numbers(rig: Rig, fault: str) -> None:
    """Every name was loaded and every byte was right on its way: only what it says tells. The push heals it itself."""
    before = await rig.pushed(with_reference(rig, Order(61)))
    assert rig.ends[-1]["verified"] == {"e0": "reference"}
    (rig.work / "fault").write_text(fault)
    number = await rig.pushed(with_reference(rig, Order(62)))
    refused = (await rig.fleet.engine("e0")).status.refused
    assert (refused.reason, refused.version.number) == ("CANARY_FAILED", before + 1)
    assert "differ from the trainer's" in refused.message
    assert number == before + 2
    assert await rig.says() == (rig.truth(Order(62)), [(number, 0, COUNT)])


# ---- updates under load -------------------------------------------------------------------------


LONG_PROMPT = [1 + (11 * i) % (VOCAB - 1) for i in range(70)]
"""Two blocks of the KV cache and some tokens: what is shorter than a block is never cached."""


async def remembered(rig: Rig) -> tuple[Said, int]:
    """What it says, and how many tokens of the prompt came from its prefix cache."""
    client, greedily = await rig.rollouts(), SamplingSettings(max_tokens=COUNT, temperature=0.0, ignore_eos=True)
    made = await client.generate(LONG_PROMPT, greedily)
    spans = [(span.version.number, span.start, span.end) for span in made.spans]
    return (list(made.tokens), spans), made.cached_prompt_tokens


@pytest.mark.parametrize("mode", ["keep", "abort", "wait"])
async def test_R1_an_update_under_32_requests_loses_none_but_by_abort_and_their_spans_are_true(
    rig: Rig, mode: str
) -> None:
    old, new = Order(71), Order(72)
    before = await rig.pushed(old)
    stale = [await remembered(rig) for _ in range(2)]
    assert [cached for _, cached in stale] == [0, 64], "a prefix that is not in the cache proves nothing"
    async with thirty_two(rig) as samples:
        number = await rig.pushed(replace(new, pause=(mode, 80.0, "keep")))
    both = [made for made in samples if [span.version.number for span in made[1].spans] == [before, number]]
    cut = [made for made in samples if made[1].finish_reason == "abort"]
    whole = [made for made in samples if made[1].finish_reason == "length" and len(made[1].tokens) == LENGTH]
    assert len(cut) + len(whole) == len(samples)
    assert [bool(both), bool(cut)] == {"keep": [True, False], "abort": [False, True], "wait": [False, False]}[mode]
    by = {before: old, number: new}
    for prompt, sample in [*both[:2], *cut[:2], samples[0], samples[-1]]:
        for span in sample.spans:
            assert made_by(rig, by[span.version.number], sample, prompt, span)
            other = by[before if span.version.number == number else number]
            assert span.end - span.start < 5 or not made_by(rig, other, sample, prompt, span)
    assert await remembered(rig) == ((rig.truth(new, LONG_PROMPT), [(number, 0, COUNT)]), 0)
    assert stale[1][0] == stale[0][0] == (rig.truth(old, LONG_PROMPT), [(before, 0, COUNT)])
    assert rig.truth(new, LONG_PROMPT) != rig.truth(old, LONG_PROMPT)


# ---- installs that fail half-way ----------------------------------------------------------------


@pytest.mark.parametrize("share", FAILS_AFTER)
async def test_P1_a_failure_after_some_tensors_poisons_and_shuts_and_the_next_push_heals(rig: Rig, share: str) -> None:
    """A push repeats itself: its second attempt is the next push."""
    before = await rig.pushed(Order(81))
    seen: list[engine_pb2.EngineStatus] = []
    watching = asyncio.create_task(watch(rig, seen))
    tensors = len(weights(rig.model, Order(81)))
    (rig.work / "failpoints" / "worker.install").write_text(f"raise after={FAILS_AFTER[share](tensors)}")
    number = await rig.pushed(Order(82))
    watching.cancel()
    poisoned = [s for s in seen if s.weights == engine_pb2.WEIGHTS_STATE_POISONED]
    assert poisoned, "it was never seen poisoned"
    assert not any(s.gate_open or s.HasField("applied") for s in poisoned)
    assert {s.applied.number for s in seen if s.gate_open} <= {before, number}
    assert (await rig.fleet.engine("e0")).status.refused.reason == "INSTALL_FAILED"
    assert number == before + 2
    assert await rig.says() == (rig.truth(Order(82)), [(number, 0, COUNT)])


# ---- a person's commands ------------------------------------------------------------------------


async def told(rig: Rig, method: str, request: Any, **fields: Any) -> Any:
    """The answer of one Lifecycle call."""
    view = await rig.fleet.engine("e0")
    call = getattr(lifecycle_pb2_grpc.LifecycleStub(rig.fleet.channel(view.endpoint)), method)
    return await call(request(run_id=RUN, engine=view.status.engine, **fields), timeout=150)


@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_a_persons_pause_leaves_no_request_in_vllm_and_the_next_ones_wait_for_the_resume(
    rig: Rig, mode: str
) -> None:
    """vLLM refuses to forget its prefixes while a request holds any: that is its own word."""
    order = Order(74)
    number = await rig.pushed(order)
    how = pause_pb2.PauseMode.Value(f"PAUSE_MODE_{mode.upper()}")
    async with thirty_two(rig) as samples:
        assert not await rig.llms[-1].reset_prefix_cache()
        paused = await told(rig, "PauseGeneration", lifecycle_pb2.PauseGenerationRequest, owner="ann", mode=how)
        assert [hold.owner for hold in paused.status.holds] == ["ann"]
        assert (paused.aborted_requests > 0, paused.status.gate_open) == (mode == "abort", False)
        await eventually(lambda: nothing_lives(rig))
        await eventually(rig.llms[-1].reset_prefix_cache)
        assert await nothing_lives(rig), "one went in by a shut gate"
        before = len(samples)
        await told(rig, "ResumeGeneration", lifecycle_pb2.ResumeGenerationRequest, owner="ann")
    cut = [made for made in samples if made[1].finish_reason == "abort"]
    assert (len(cut) > 0) == (mode == "abort")
    assert len(samples) >= before + RUNNING
    for prompt, sample in [*cut[:2], samples[-1]]:
        (span,) = sample.spans
        assert (span.version.number, span.start, span.end) == (number, 0, len(sample.tokens))
        assert made_by(rig, order, sample, prompt, span)


async def nothing_lives(rig: Rig) -> bool:
    return (await rig.fleet.status("e0")).live_requests == 0


async def test_who_is_named_ends_with_its_tokens_and_a_flush_forgets_prefixes_beside_one_that_goes_on(rig: Rig) -> None:
    number = await rig.pushed(Order(75))
    stub = await rollout_stub(rig)

    async def cached() -> int:
        request = rollout_pb2.GenerateRequest(
            run_id=RUN, model="policy", prompt_token_ids=TEXT[:200], sampling=rollout_pb2.SamplingParams(max_tokens=1)
        )
        return (await LiveSample(stub.Generate(request, timeout=120)).end()).cached_prompt_tokens

    assert await cached() == 0
    assert await cached() > 100
    named, other = (LiveSample(stub.Generate(long(400, name), timeout=150)) for name in ("named", "other"))
    await asyncio.gather(named.has(3), other.has(3))
    answer = await told(rig, "AbortRequests", lifecycle_pb2.AbortRequestsRequest, request_ids=["named", "nobody"])
    assert list(answer.request_ids) == ["named"]
    assert await named.reason() == "ABORT"
    await told(rig, "FlushCache", lifecycle_pb2.FlushCacheRequest)
    assert other.running, "it ended by itself: nothing was flushed beside it"
    assert await cached() == 0
    assert await other.reason() == "LENGTH"
    truth = Reference(rig.written(Order(75)))
    for sample in (named, other):
        tokens = [token for token, _ in sample.stamps]
        (span,) = (await sample.end()).spans
        assert (span.version.number, span.start, span.end) == (number, 0, len(tokens))
        assert max(truth.shortfalls({}, PROMPT, tokens)) < 1e-3


# ---- scores, and what becomes of requests that nobody waits for ----------------------------------

TEXT = [1 + (7 * i) % (VOCAB - 1) for i in range(400)]


async def rollout_stub(rig: Rig) -> Any:
    return rollout_pb2_grpc.RolloutStub(rig.fleet.channel((await rig.fleet.engine("e0")).endpoint))


def right(rig: Rig, order: Order, text: Sequence[int], logprobs: Sequence[float]) -> bool:
    """Entry by entry what transformers says of the weights; each token but the first has one."""
    return list(logprobs) == pytest.approx(Reference(rig.written(order)).score({}, text[:1], text[1:]), abs=TOLERANCE)


async def test_a_score_under_load_has_transformers_number_for_each_token_but_the_first(rig: Rig) -> None:
    number, client = await rig.pushed(Order(91)), await rig.rollouts()
    texts = [TEXT[:2], TEXT[:33], TEXT]
    async with thirty_two(rig):
        found = [await client.score(text) for text in texts]
    for text, scores in zip(texts, found, strict=True):
        assert (scores.version.number, len(scores.logprobs), scores.logprobs[0]) == (number, len(text), None)
        assert right(rig, Order(91), text, [p for p in scores.logprobs if p is not None])
    assert not right(rig, Order(92), TEXT, [p for p in found[-1].logprobs if p is not None]), "any weights would do"


async def test_a_score_that_an_install_comes_into_is_refused_and_asked_again_by_the_client(rig: Rig) -> None:
    by = {await rig.pushed(Order(93)): Order(93)}
    stub, client, over = await rollout_stub(rig), await rig.rollouts(), asyncio.Event()
    request = rollout_pb2.ScoreRequest(run_id=RUN, model="policy", token_ids=TEXT)
    answers: list[rollout_pb2.ScoreResponse] = []
    cut: list[grpc.aio.AioRpcError] = []
    asked_again: list[Scores] = []

    async def by_hand() -> None:
        while not over.is_set():
            try:
                answers.append(await stub.Score(request, timeout=150))
            except grpc.aio.AioRpcError as error:
                cut.append(error)

    async def by_client() -> None:
        while not over.is_set():
            asked_again.append(await client.score(TEXT))

    async with asyncio.TaskGroup() as group:
        for work in [by_hand] * 16 + [by_client] * 16:
            group.create_task(work())
        await eventually(lambda: len(answers) > 16)
        by[await rig.pushed(Order(94))] = Order(94)
        over.set()
    assert cut
    assert {error.code() for error in cut} == {grpc.StatusCode.ABORTED}
    assert {type(from_rpc_error(error)) for error in cut} == {VersionChanged}
    said = [(a.version.number, tuple(a.logprobs)) for a in answers]
    said += [(s.version.number, tuple(p for p in s.logprobs if p is not None)) for s in asked_again]
    assert {number for number, _ in said} == set(by)
    assert all(right(rig, by[number], TEXT, logprobs) for number, logprobs in said[:2] + said[-2:])


def long(max_tokens: int, request_id: str = "") -> rollout_pb2.GenerateRequest:
    sampling = rollout_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0.0)
    return rollout_pb2.GenerateRequest(
        run_id=RUN, model="policy", request_id=request_id, prompt_token_ids=PROMPT, sampling=sampling
    )


async def test_R4_a_client_that_goes_away_or_is_out_of_time_leaves_nothing_running_in_vllm(rig: Rig) -> None:
    """vLLM refuses to forget its prefixes while a request holds any: that is its own word."""
    await rig.pushed(Order(95))
    stub, client = await rollout_stub(rig), await rig.rollouts()
    calls = [stub.Generate(long(500), timeout=120) for _ in range(8)]
    await asyncio.gather(*(call.read() for call in calls))
    assert not await rig.llms[-1].reset_prefix_cache()
    with pytest.raises(DeadlineExceeded):
        await client.generate(PROMPT, SamplingSettings(max_tokens=500, ignore_eos=True), deadline_seconds=0.5)
    assert (await rig.fleet.status("e0")).live_requests >= len(calls), "they ended by themselves: nothing was tried"
    for call in calls:
        call.cancel()
    await eventually(lambda: live(rig, 0, 0))
    await eventually(rig.llms[-1].reset_prefix_cache)


async def live(rig: Rig, requests: int, waiting: int) -> bool:
    status = await rig.fleet.status("e0")
    return (status.live_requests, status.waiting_requests) == (requests, waiting)


async def test_requests_that_find_no_place_in_vllms_batch_are_counted_as_waiting(rig: Rig) -> None:
    await rig.pushed(Order(96))
    stub, more, begun = await rollout_stub(rig), 7, set()

    async def follow(i: int) -> None:
        async for _ in stub.Generate(long(300), timeout=120):
            begun.add(i)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(follow(i)) for i in range(RUNNING + 1 + more)]
        await eventually(lambda: live(rig, len(tasks), more))
        await eventually(lambda: len(begun) == len(tasks) - more)
        assert await live(rig, len(tasks), more)
        for task in tasks:
            task.cancel()
    await eventually(lambda: live(rig, 0, 0))
