"""What the rollout client asks of an engine, what it takes for a sample, and whom it asks when one cannot serve."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from controlplane.core import errors as e
from controlplane.core.sample_spans import Span
from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import EngineId
from controlplane.rollout.client import RolloutClient
from controlplane.rollout.sample import Delta, Sample
from tests.support.eventually import PATIENCE_SECONDS, eventually
from tests.support.fake_fleet import FakeEngine, Script, finish, hangs, refuses, says, tokens, version
from tests.support.rollout_world import GOOD, NOT_READY, PROMPT, SAMPLING, World


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.stack.aclose()


async def test_a_sample_has_its_tokens_logprobs_and_spans(world: World) -> None:
    await world.start()
    script = says(tokens(5, 6), tokens(7, made_by=2), finish((1, 0, 2), (2, 2, 3), reason="STOP"))
    world.fleet.publish(await world.engine("a", script))

    sample = await world.generate(min_version=version(1), request_id="r-1")

    assert sample == Sample(
        tokens=(5, 6, 7),
        logprobs=(-5.0, -6.0, -7.0),
        spans=(Span(version(1), 0, 2), Span(version(2), 2, 3)),
        finish_reason="stop",
        stop_reason="",
        engine_id=EngineId("a"),
        prompt_tokens=3,
        cached_prompt_tokens=2,
    )


async def test_the_request_names_run_model_pin_and_sampling(world: World) -> None:
    await world.start(model="teacher")
    engine = await world.engine("a", GOOD)
    world.fleet.publish(engine)

    await world.client.generate(PROMPT, SamplingSettings(max_tokens=4, temperature=0.0), min_version=version(1))

    request = engine.requests[0]
    assert (request.run_id, request.model) == ("run-a", "teacher")
    assert request.request_id
    assert request.pin.min_version.number == 1
    assert request.sampling.max_tokens == 4
    assert request.sampling.temperature == 0.0
    assert 0 < request.wait.ToSeconds() + request.wait.nanos / 1e9 < PATIENCE_SECONDS


@pytest.mark.parametrize(
    "error",
    [
        NOT_READY,
        e.EnginePoisoned(engine_id="a", cause="install"),
        e.VersionUnavailable(wanted="1.2", applied="1.1"),
        e.EngineDied(engine_id="a", cause="signal 9"),
        e.LimitExceeded(what="waiting requests", limit=1, got=2),
        e.WrongRun(expected="other", got="run-a"),
    ],
    ids=lambda error: error.reason,
)
async def test_another_engine_is_tried_when_one_cannot_serve(world: World, error: e.WeightplaneError) -> None:
    await world.start()
    first = await world.engine("a", refuses(error))
    second = await world.engine("b", GOOD, live_requests=9)
    world.fleet.publish(first, second)

    assert (await world.generate()).engine_id == "b"
    assert len(first.requests) == 1


async def test_another_engine_is_tried_when_one_aborts_before_its_first_token(world: World) -> None:
    await world.start()
    first = await world.engine("a", says(finish(reason="ABORT")))
    world.fleet.publish(first, await world.engine("b", GOOD, live_requests=9))

    assert (await world.generate()).engine_id == "b"


async def test_a_sample_that_its_caller_ended_before_its_first_token_is_asked_of_nobody_else(world: World) -> None:
    await world.start()
    second = await world.engine("b", GOOD, live_requests=9)
    world.fleet.publish(await world.engine("a", says(finish(reason="ABORT", stop_reason="aborted"))), second)

    sample = await world.generate()

    assert (sample.tokens, sample.finish_reason, sample.stop_reason) == ((), "abort", "aborted")
    assert not second.requests


async def test_another_engine_is_tried_when_nobody_answers_at_an_endpoint(world: World) -> None:
    await world.start()
    gone = FakeEngine("a", GOOD, endpoint="127.0.0.1:1")
    world.fleet.publish(gone, await world.engine("b", GOOD, live_requests=9))

    assert (await world.generate()).engine_id == "b"


async def test_an_invalid_request_is_tried_once(world: World) -> None:
    await world.start()
    refused = refuses(e.InvalidRequest(field="prompt_token_ids", problem="9 is beyond the vocabulary"))
    engines = [await world.engine(name, refused) for name in "ab"]
    world.fleet.publish(*engines)

    with pytest.raises(e.InvalidRequest, match="vocabulary"):
        await world.generate()
    assert sum(len(engine.requests) for engine in engines) == 1


async def test_a_request_that_breaks_the_schema_is_never_sent(world: World) -> None:
    await world.start()
    engine = await world.engine("a", GOOD)
    world.fleet.publish(engine)

    with pytest.raises(e.FrameInvalid, match="max_tokens"):
        await world.client.generate(PROMPT, SamplingSettings(max_tokens=0))
    with pytest.raises(e.InvalidRequest):
        await world.client.generate([2**40], SAMPLING)
    assert engine.requests == []


async def test_after_the_first_token_an_error_reaches_the_caller(world: World) -> None:
    await world.start()
    first = await world.engine("a", refuses(NOT_READY, tokens(5)))
    second = await world.engine("b", GOOD, live_requests=9)
    world.fleet.publish(first, second)

    with pytest.raises(e.EngineNotReady):
        await world.generate()
    assert second.requests == []


async def test_when_every_engine_declines_all_are_tried_again_until_the_wait_is_over(world: World) -> None:
    await world.start()
    engines = [await world.engine(name, refuses(NOT_READY)) for name in "ab"]
    world.fleet.publish(*engines)
    trying = asyncio.create_task(world.generate())
    await eventually(lambda: all(len(engine.requests) >= 3 for engine in engines))
    assert not trying.done()
    trying.cancel()

    async with RolloutClient(world.server.address, wait_seconds=0.2) as impatient:
        await eventually(lambda: impatient.routes)
        with pytest.raises(e.EngineNotReady):
            await impatient.generate(PROMPT, SAMPLING)


async def test_an_engine_that_becomes_ready_ends_the_wait(world: World) -> None:
    await world.start()
    engine = await world.engine("a", refuses(NOT_READY))
    world.fleet.publish(engine)
    waiting = asyncio.create_task(world.generate())
    await eventually(lambda: len(engine.requests) >= 1)

    engine.script = GOOD

    assert (await waiting).tokens == (5, 6, 7)


async def test_the_deadline_bounds_a_sample_that_does_not_end(world: World) -> None:
    await world.start()
    engine = await world.engine("a", hangs(tokens(5)))
    world.fleet.publish(engine)
    await eventually(lambda: world.client.routes)

    with pytest.raises(e.DeadlineExceeded, match="generate"):
        await world.generate(deadline_seconds=0.5)
    await eventually(lambda: engine.running == 0)


@pytest.mark.parametrize(
    "script",
    [
        says(tokens(5, 6), finish((1, 0, 1))),
        says(tokens(5, 6), finish((1, 0, 3))),
        says(tokens(5, 6), finish((2, 0, 2))),
        says(tokens(5), tokens(6, made_by=2), finish((1, 0, 2))),
        says(tokens(5, 6), finish((1, 0, 1), (1, 1, 2))),
        says(tokens(5, 6), finish()),
        says(finish((1, 0, 1))),
    ],
    ids=["short", "long", "other version", "border lost", "cut in two", "none", "without tokens"],
)
async def test_inv_11_spans_that_do_not_cover_the_tokens_exactly_are_refused(world: World, script: Script) -> None:
    await world.start()
    world.fleet.publish(await world.engine("a", script))

    with pytest.raises(e.SpanMismatch):
        await world.generate()


async def test_inv_11_tokens_below_the_pin_are_refused(world: World) -> None:
    await world.start()
    world.fleet.publish(await world.engine("a", GOOD, applied=version(2)))

    with pytest.raises(e.SpanMismatch, match=r"1\.2 or later"):
        await world.generate(min_version=version(2))


async def test_a_stream_without_a_finish_is_no_sample(world: World) -> None:
    await world.start()
    world.fleet.publish(await world.engine("a", says(tokens(5))))

    with pytest.raises(e.PeerLost, match="without a finish"):
        await world.generate()


async def test_a_stream_gives_each_delta_with_its_version_and_then_the_ending(world: World) -> None:
    await world.start()
    world.fleet.publish(await world.engine("a", GOOD))

    deltas = [delta async for delta in world.client.stream(PROMPT, SAMPLING)]

    assert [d.tokens for d in deltas] == [(5, 6), (7,), ()]
    assert [d.version for d in deltas] == [version(1), version(1), None]
    assert deltas[-1].ending is not None
    assert deltas[-1].ending.spans == (Span(version(1), 0, 3),)


async def test_leaving_a_stream_aborts_the_request(world: World) -> None:
    await world.start()
    engine = await world.engine("a", hangs(tokens(5)))
    world.fleet.publish(engine)

    first: Delta | None = None
    async with aclosing(world.client.stream(PROMPT, SAMPLING)) as deltas:
        async for delta in deltas:
            first = delta
            break

    assert first is not None
    assert first.tokens == (5,)
    await eventually(lambda: engine.running == 0)
