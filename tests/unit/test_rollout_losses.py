"""What becomes of samples whose engine goes away or cuts them, and how engines are chosen; scripted, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from controlplane.core import errors as e
from controlplane.core.sample_spans import ABORTED, PAUSED, POISONED, UPDATING, Span
from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import EngineId, Incarnation, RunId
from controlplane.rollout.blocking import BlockingRolloutClient
from controlplane.rollout.policies import BySession, PowerOfTwo
from controlplane.rollout.routing import Route, Routes, RoutingTable
from tests.support.eventually import eventually
from tests.support.fake_fleet import finish, hangs, refuses, says, tokens, version
from tests.support.rollout_world import PROMPT, World, first_then
from weightplane.v1 import rollout_pb2

FOUR = SamplingSettings(max_tokens=4)
DIED = refuses(e.EngineDied(engine_id="a", cause="killed"), tokens(5, 6))
REST = says(tokens(7, 8, made_by=2), finish((2, 0, 2)))


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.stack.aclose()


async def test_inv11_a_resumed_sample_goes_on_from_its_tokens_and_its_spans_show_both_versions(world: World) -> None:
    await world.start(on_loss="resume")
    engine = await world.engine("a", first_then(DIED, REST))
    world.fleet.publish(engine)
    sample = await world.client.generate(PROMPT, FOUR)
    assert sample.tokens == (5, 6, 7, 8)
    assert sample.logprobs == (-5.0, -6.0, -7.0, -8.0)
    assert sample.spans == (Span(version(1), 0, 2), Span(version(2), 2, 4))
    assert sample.loss_mask(version(2)) == (False, False, True, True)
    again = engine.requests[1]
    assert list(again.prompt_token_ids) == [*PROMPT, 5, 6]
    assert again.sampling.max_tokens == 2


async def test_spans_of_one_version_over_two_engines_are_one_span(world: World) -> None:
    await world.start(on_loss="resume")
    rest = says(tokens(7, 8), finish((1, 0, 2)))
    world.fleet.publish(await world.engine("a", first_then(DIED, rest)))
    assert (await world.client.generate(PROMPT, FOUR)).spans == (Span(version(1), 0, 4),)


async def test_inv11_a_resumed_part_is_judged_by_its_own_spans(world: World) -> None:
    await world.start(on_loss="resume")
    wrong = says(tokens(7, 8, made_by=2), finish((2, 2, 4)))
    world.fleet.publish(await world.engine("a", first_then(DIED, wrong)))
    with pytest.raises(e.SpanMismatch):
        await world.client.generate(PROMPT, FOUR)


async def test_a_sample_that_had_all_its_tokens_ends_there(world: World) -> None:
    await world.start(on_loss="resume")
    died = refuses(e.EngineDied(engine_id="a", cause="killed"), tokens(5, 6, 7, 8))
    engine = await world.engine("a", died)
    world.fleet.publish(engine)
    sample = await world.client.generate(PROMPT, FOUR)
    assert (sample.tokens, sample.finish_reason) == ((5, 6, 7, 8), "length")
    assert len(engine.requests) == 1


async def test_a_restarted_sample_has_nothing_of_the_lost_one(world: World) -> None:
    await world.start(on_loss="restart")
    whole = says(tokens(1, 2, made_by=2), finish((2, 0, 2)))
    engine = await world.engine("a", first_then(DIED, whole))
    world.fleet.publish(engine)
    sample = await world.client.generate(PROMPT, FOUR)
    assert (sample.tokens, sample.spans) == ((1, 2), (Span(version(2), 0, 2),))
    assert list(engine.requests[1].prompt_token_ids) == PROMPT


@pytest.mark.parametrize("why", [PAUSED, UPDATING, POISONED, "", "error"])
async def test_a_sample_that_its_caller_did_not_end_goes_on_whatever_cut_it(world: World, why: str) -> None:
    """A server behind an agent ends requests without a word, and vLLM says `error`."""
    await world.start(on_loss="resume")
    cut = says(tokens(5, 6), finish((1, 0, 2), reason="ABORT", stop_reason=why))
    world.fleet.publish(await world.engine("a", first_then(cut, REST)))
    assert (await world.client.generate(PROMPT, FOUR)).tokens == (5, 6, 7, 8)


async def test_a_sample_that_its_caller_aborted_is_not_taken_up_again(world: World) -> None:
    await world.start(on_loss="resume")
    aborted = says(tokens(5, 6), finish((1, 0, 2), reason="ABORT", stop_reason=ABORTED))
    engine = await world.engine("a", aborted)
    world.fleet.publish(engine)
    sample = await world.client.generate(PROMPT, FOUR)
    assert (sample.tokens, sample.finish_reason) == ((5, 6), "abort")
    assert len(engine.requests) == 1


async def test_a_cut_sample_that_was_handed_out_goes_on_as_a_prefix(world: World) -> None:
    await world.start()
    cut = says(tokens(5, 6), finish((1, 0, 2), reason="ABORT", stop_reason=PAUSED))
    world.fleet.publish(await world.engine("a", first_then(cut, REST)))
    partial = await world.client.generate(PROMPT, FOUR)
    assert (partial.tokens, partial.finish_reason) == ((5, 6), "abort")
    whole = await world.client.generate(PROMPT, FOUR, prefix=partial)
    assert whole.tokens == (5, 6, 7, 8)
    assert whole.spans == (Span(version(1), 0, 2), Span(version(2), 2, 4))


async def test_a_prefix_is_no_reason_to_give_up_at_the_first_engine_that_declines(world: World) -> None:
    await world.start()
    cut = says(tokens(5, 6), finish((1, 0, 2), reason="ABORT", stop_reason=PAUSED))
    declines = refuses(e.EngineNotReady(engine_id="a", holds="operator"))
    world.fleet.publish(await world.engine("a", first_then(cut, first_then(declines, REST))))
    partial = await world.client.generate(PROMPT, FOUR)
    assert (await world.client.generate(PROMPT, FOUR, prefix=partial)).tokens == (5, 6, 7, 8)


async def test_a_stream_that_is_resumed_hands_out_each_token_once_and_one_ending(world: World) -> None:
    await world.start(on_loss="resume")
    world.fleet.publish(await world.engine("a", first_then(DIED, REST)))
    deltas = [delta async for delta in world.client.stream(PROMPT, FOUR)]
    assert [token for delta in deltas for token in delta.tokens] == [5, 6, 7, 8]
    assert [delta.ending is not None for delta in deltas] == [False, False, True]


async def test_what_its_caller_ends_comes_back_as_it_is_wherever_it_was(world: World) -> None:
    await world.start(on_loss="resume")
    engine = await world.engine("a", hangs(tokens(5, 6)), max_requests=1)
    world.fleet.publish(engine)
    asked = [asyncio.create_task(world.client.generate(PROMPT, FOUR, request_id=name)) for name in ("first", "second")]
    await eventually(lambda: engine.running == 1)
    await world.client.abort(["second"])
    waited = await asked[1]
    assert (waited.tokens, waited.spans, waited.finish_reason, waited.stop_reason) == ((), (), "abort", "aborted")
    await world.client.abort()
    running = await asked[0]
    assert (running.tokens, running.spans, running.finish_reason) == ((5, 6), (Span(version(1), 0, 2),), "abort")
    assert len(engine.requests) == 1


async def test_a_request_that_is_ended_before_its_first_token_is_not_asked_for_elsewhere(world: World) -> None:
    await world.start()
    engine = await world.engine("a", hangs())
    world.fleet.publish(engine)
    asked = asyncio.create_task(world.client.generate(PROMPT, FOUR))
    await eventually(lambda: engine.running == 1)
    await world.client.abort()
    assert (await asked).tokens == ()
    assert len(engine.requests) == 1


async def test_an_engine_that_cannot_be_told_of_an_end_ends_what_it_has_by_going_away(world: World) -> None:
    await world.start(on_loss="resume")
    begun, died = asyncio.Event(), e.EngineDied(engine_id="a", cause="killed")

    async def dies(request: rollout_pb2.GenerateRequest) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        yield tokens(5, 6)
        await begun.wait()
        raise died

    engine = await world.engine("a", dies)
    engine.deaf = True
    world.fleet.publish(engine)
    asked = asyncio.create_task(world.client.generate(PROMPT, FOUR))
    await eventually(lambda: engine.running == 1)
    await world.client.abort()
    begun.set()
    sample = await asked
    assert (sample.tokens, sample.spans, sample.finish_reason) == ((5, 6), (Span(version(1), 0, 2),), "abort")
    assert len(engine.requests) == 1


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("presence_penalty", {"presence_penalty": 0.5}),
        ("frequency_penalty", {"frequency_penalty": 0.5}),
        ("extra.structured_outputs", {"extra": {"structured_outputs": {"regex": "a+"}}}),
        ("extra.bad_words", {"extra": {"bad_words": ["no", "never"]}}),
        ("extra.thinking_token_budget", {"extra": {"thinking_token_budget": 0}}),
        ("extra.repetition_detection", {"extra": {"repetition_detection": {"max_pattern_size": 2}}}),
        ("extra.stop", {"extra": {"stop": "\n", "logit_bias": {"3": 1.0}}}),
        ("extra.of_a_later_vllm", {"extra": {"of_a_later_vllm": True}}),
    ],
)
async def test_what_would_begin_anew_in_mid_sample_is_refused_before_an_engine_is_asked(
    world: World, field: str, settings: dict[str, Any]
) -> None:
    await world.start()
    cut = says(tokens(5, 6), finish((1, 0, 2), reason="ABORT", stop_reason=PAUSED))
    engine = await world.engine("a", cut)
    world.fleet.publish(engine)
    sampling = SamplingSettings(max_tokens=4, **settings)
    with pytest.raises(e.InvalidRequest, match=rf"^on_loss: a sample with {field} cannot go on"):
        await world.client.generate(PROMPT, sampling, on_loss="resume")
    partial = await world.client.generate(PROMPT, sampling, on_loss="fail")
    with pytest.raises(e.InvalidRequest, match=rf"^prefix: a sample with {field} cannot go on"):
        await world.client.generate(PROMPT, sampling, prefix=partial)
    assert len(engine.requests) == 1


async def test_what_looks_at_no_token_before_may_be_resumed(world: World) -> None:
    await world.start(on_loss="resume")
    engine = await world.engine("a", first_then(DIED, REST))
    world.fleet.publish(engine)
    blind = {"logit_bias": {"3": 1.0}, "allowed_token_ids": [5, 6, 7, 8], "stop": [], "bad_words": None}
    settings = SamplingSettings(max_tokens=4, repetition_penalty=1.5, min_tokens=2, extra=blind)
    assert (await world.client.generate(PROMPT, settings)).tokens == (5, 6, 7, 8)
    assert engine.requests[1].sampling.extra == engine.requests[0].sampling.extra


async def test_what_was_handed_out_is_not_taken_back(world: World) -> None:
    await world.start()
    with pytest.raises(e.InvalidRequest, match="cannot be restarted"):
        await anext(world.client.stream(PROMPT, FOUR, on_loss="restart"))


async def test_full_engines_are_asked_no_more_until_one_of_their_requests_ends(world: World) -> None:
    await world.start()
    release = asyncio.Event()
    engine = await world.engine("a", hangs(until=release), max_requests=2)
    world.fleet.publish(engine)
    running = [asyncio.create_task(world.client.generate(PROMPT, FOUR)) for _ in range(5)]
    await eventually(lambda: engine.running == 2)
    assert len(engine.requests) == 2
    release.set()
    await asyncio.gather(*running)
    assert (len(engine.requests), engine.peak) == (5, 2)


async def test_a_batch_gives_each_prompt_its_samples_and_tells_how_far_it_is(world: World) -> None:
    await world.start()
    engine = await world.engine("a", says(tokens(5), finish((1, 0, 1))))
    world.fleet.publish(engine)
    told: list[tuple[int, int]] = []
    sampling = SamplingSettings(max_tokens=1, n=2, seed=7)
    found = await world.client.generate_batch([[1], [2], [3]], sampling, progress=lambda *p: told.append(p))
    assert [len(samples) for samples in found] == [2, 2, 2]
    assert told == [(i, 6) for i in range(1, 7)]
    assert sorted((r.prompt_token_ids[0], r.sampling.seed) for r in engine.requests) == [
        (prompt, seed) for prompt in (1, 2, 3) for seed in (7, 8)
    ]


async def test_a_score_is_asked_again_where_an_install_came_between(world: World) -> None:
    await world.start()
    engine = await world.engine("a", first_then(refuses(e.VersionChanged(request_id="x")), says()))
    world.fleet.publish(engine)
    scores = await world.client.score([4, 5, 6])
    assert scores.logprobs == (None, -5.0, -6.0)
    assert scores.version == version(1)


async def test_code_without_an_event_loop_gets_the_same(world: World) -> None:
    await world.start()
    world.fleet.publish(await world.engine("a", says(tokens(5), finish((1, 0, 1)))))

    def blocking() -> tuple[int, ...]:
        with BlockingRolloutClient(world.server.address, wait_seconds=60.0) as rollouts:
            rollouts.abort()  # there is nothing: no error
            return rollouts.generate(PROMPT, FOUR).tokens

    assert await asyncio.to_thread(blocking) == (5,)


# ---- policies -----------------------------------------------------------------------------------


def route(name: str) -> Route:
    return Route(EngineId(name), Incarnation("i"), f"{name}:1", version(1), 0)


def test_a_session_stays_at_its_engine_and_moves_only_with_it() -> None:
    table, policy, engines = RoutingTable(), BySession(), [route(n) for n in "abcd"]
    homes = {str(s): policy.choose(engines, table, str(s)).engine_id for s in range(200)}
    assert set(homes.values()) == set("abcd")
    left = [r for r in engines if r.engine_id != "b"]
    for session, home in homes.items():
        if home != "b":
            assert policy.choose(left, table, session).engine_id == home


def test_of_two_at_random_the_less_loaded_is_asked() -> None:
    table, policy = RoutingTable(), PowerOfTwo(seed=1)
    engines = [route("a"), route("b")]
    with table.asking(engines[0]):
        assert {policy.choose(engines, table, "").engine_id for _ in range(20)} == {"b"}


# ---- room ---------------------------------------------------------------------------------------


def told(table: RoutingTable, live_requests: int) -> Route:
    """What the coordinator says of an engine that runs two requests at once."""
    heard = replace(route("a"), live_requests=live_requests, max_requests=2)
    table.replace(Routes(RunId("run-a"), 1, (heard,), (version(1),)))
    return heard


def test_an_engine_that_others_fill_has_no_room() -> None:
    table = RoutingTable()
    assert not table.has_room(told(table, 2))
    assert table.has_room(told(table, 1))


def test_own_requests_that_an_engine_reports_are_not_taken_for_others() -> None:
    table = RoutingTable()
    with table.asking(told(table, 0)):
        assert table.has_room(told(table, 1)), "the one that it reports is this client's"
        full = told(table, 2)
        assert not table.has_room(full), "one is this client's, the other somebody else's"
    assert table.has_room(full), "somebody else's is left"
