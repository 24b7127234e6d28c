"""The rollout client against a scripted coordinator and scripted engines, over real gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial
from typing import Any

import pytest
from structlog.testing import capture_logs

from controlplane.core import errors as e
from controlplane.core.sample_spans import Span
from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import EngineId
from controlplane.rollout.client import RolloutClient
from controlplane.rollout.sample import Delta, Sample
from controlplane.rpc.server import RunningServer
from tests.support.eventually import eventually
from tests.support.fake_fleet import (
    FakeEngine,
    Script,
    finish,
    hangs,
    new_fleet,
    refuses,
    says,
    serve_engine,
    serve_fleet,
    tokens,
    version,
)
from tests.support.slow_link import carry

PROMPT = [1, 2, 3]
SAMPLING = SamplingSettings(max_tokens=8)
GOOD = says(tokens(5, 6), tokens(7), finish((1, 0, 3)))
NOT_READY = e.EngineNotReady(engine_id="a", holds="operator")


class World:
    """A scripted fleet and a client of it."""

    def __init__(self) -> None:
        self.fleet = new_fleet()
        self.stack = AsyncExitStack()
        self.server: RunningServer
        self.client: RolloutClient

    async def start(self, **options: Any) -> None:
        self.server = await serve_fleet(self.fleet)
        self.stack.push_async_callback(self.server.stop)
        self.client = await self.stack.enter_async_context(
            RolloutClient(self.server.address, **({"wait_seconds": 3.0} | options))
        )

    async def engine(self, name: str, script: Script, **fields: Any) -> FakeEngine:
        engine = FakeEngine(name, script, **fields)
        server = await serve_engine(engine)
        self.stack.push_async_callback(server.stop)
        return engine

    async def generate(self, **options: Any) -> Sample:
        return await self.client.generate(PROMPT, SAMPLING, **options)


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
    assert 0 < request.wait.ToSeconds() + request.wait.nanos / 1e9 < 3


async def test_requests_go_to_the_engine_with_fewest_of_this_clients_requests(world: World) -> None:
    await world.start()
    release = asyncio.Event()
    first, second = [await world.engine(name, hangs(until=release)) for name in "ab"]
    world.fleet.publish(first, second)
    await eventually(lambda: world.client.routes)

    running = [asyncio.create_task(world.generate()) for _ in range(6)]
    await eventually(lambda: first.running + second.running == 6)
    assert (first.running, second.running) == (3, 3)

    release.set()
    assert {(await task).tokens for task in running} == {(9,)}


async def test_a_burst_after_an_update_waits_a_moment_for_the_second_engine(world: World) -> None:
    await world.start()
    release = asyncio.Event()
    first, second = [await world.engine(name, hangs(until=release)) for name in "ab"]
    world.fleet.publish(first, second)
    await eventually(lambda: world.client.routes)
    world.fleet.publish()
    await eventually(lambda: world.client.routes is not None and not world.client.routes.routes)

    running = [asyncio.create_task(world.generate()) for _ in range(6)]
    world.fleet.publish(first)
    await eventually(lambda: world.client.routes is not None and len(world.client.routes.routes) == 1)
    world.fleet.publish(first, second)
    await eventually(lambda: first.running + second.running == 6)

    assert (first.running, second.running) == (3, 3)
    release.set()
    await asyncio.gather(*running)


async def test_an_engine_that_stays_away_is_waited_for_once(world: World) -> None:
    await world.start()
    first, second = [await world.engine(name, GOOD) for name in "ab"]
    world.fleet.publish(first, second)
    await eventually(lambda: world.client.routes)
    world.fleet.publish(first)
    await eventually(partial(_is_only_route, world, "a"))

    assert world.client._watch.table.usual == 2
    await world.generate()
    assert world.client._watch.table.usual == 1


async def test_only_an_engine_that_meets_the_pin_is_asked(world: World) -> None:
    await world.start()
    old = await world.engine("a", GOOD)
    new = await world.engine("b", says(tokens(8, made_by=2), finish((2, 0, 1))), applied=version(2), live_requests=50)
    world.fleet.publish(old, new)

    assert (await world.generate(min_version=version(2))).engine_id == "b"
    assert old.requests == []


async def test_a_pin_is_waited_for_until_a_route_meets_it(world: World) -> None:
    await world.start()
    engine = await world.engine("a", says(tokens(8, made_by=2), finish((2, 0, 1))))
    world.fleet.publish(engine)
    await eventually(lambda: world.client.routes)
    waiting = asyncio.create_task(world.generate(min_version=version(2)))

    engine.applied = version(2)
    world.fleet.publish(engine)

    assert (await waiting).spans == (Span(version(2), 0, 1),)


async def test_a_pin_that_no_route_meets_in_time_is_version_unavailable(world: World) -> None:
    await world.start(wait_seconds=0.2)
    world.fleet.publish(await world.engine("a", GOOD))
    await eventually(lambda: world.client.routes)

    with pytest.raises(e.VersionUnavailable, match=r"wanted version 1\.4 or later, the engine applied 1\.1"):
        await world.generate(min_version=version(4))


async def test_the_first_route_is_waited_for(world: World) -> None:
    await world.start()
    waiting = asyncio.create_task(world.generate())
    await eventually(lambda: world.fleet.watchers == 1)

    world.fleet.publish(await world.engine("a", GOOD))

    assert (await waiting).tokens == (5, 6, 7)


async def test_no_route_in_time_names_the_model_and_the_coordinator(world: World) -> None:
    await world.start(wait_seconds=0.2)
    with pytest.raises(e.DeadlineExceeded, match=rf"routable engine of model policy .* {world.server.address}"):
        await world.generate()


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
    await world.start(wait_seconds=0.8)
    engines = [await world.engine(name, refuses(NOT_READY)) for name in "ab"]
    world.fleet.publish(*engines)

    with pytest.raises(e.EngineNotReady):
        await world.generate()
    assert all(len(engine.requests) >= 2 for engine in engines)


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


async def test_inv_10_the_last_routes_stay_in_force_while_the_coordinator_is_away(world: World) -> None:
    await world.start()
    engine = await world.engine("a", GOOD)
    world.fleet.publish(engine)
    await world.generate()

    await world.server.stop()
    await eventually(lambda: world.client.routes is not None and world.client.routes.stale)
    assert (await world.generate(min_version=version(1))).tokens == (5, 6, 7)

    server = await serve_fleet(world.fleet, world.server.address)
    world.stack.push_async_callback(server.stop)
    await eventually(lambda: world.client.routes is not None and not world.client.routes.stale)


async def test_stale_routes_are_not_judged_by_the_pin_since_the_engine_knows_better(world: World) -> None:
    await world.start()
    engine = await world.engine("a", says(tokens(8, made_by=2), finish((2, 0, 1))))
    world.fleet.publish(engine)
    await eventually(lambda: world.client.routes)

    await world.server.stop()
    await eventually(lambda: world.client.routes is not None and world.client.routes.stale)

    assert (await world.generate(min_version=version(2))).spans == (Span(version(2), 0, 1),)


async def test_the_coordinator_of_another_run_is_refused(world: World) -> None:
    await world.start(run_id="run-b")
    with pytest.raises(e.WrongRun, match=r"run-a.*run-b"):
        await world.generate()


async def test_channels_of_engines_that_had_no_route_for_a_while_are_closed(world: World) -> None:
    await world.start()
    world.client._connections._linger_seconds = 0.0
    for life in range(5):
        world.fleet.publish(await world.engine(f"engine-{life}", GOOD))
        await eventually(partial(_is_only_route, world, f"engine-{life}"))
        await world.generate()
    assert len(world.client._connections._channels) == 1


async def test_an_engine_that_has_its_route_again_after_an_install_has_its_channel_still(world: World) -> None:
    """Else a whole batch meets a connection that is yet to be made, when the machine is busiest."""
    await world.start()
    engine = await world.engine("a", GOOD)
    world.fleet.publish(engine)
    await world.generate()
    (endpoint,) = world.client._connections._channels
    with world.client._connections.use(endpoint) as before:
        pass
    world.fleet.publish()
    await eventually(lambda: world.client.routes is not None and not world.client.routes.routes)
    world.fleet.publish(engine)
    await world.generate()
    with world.client._connections.use(endpoint) as after:
        assert after is before


async def test_a_batch_waits_for_an_engine_that_is_slow_to_answer_a_connection(world: World) -> None:
    """All of it met a lost peer at once when the attempt was given up after half a second."""
    await world.start()
    engine = await world.engine("a", GOOD)
    async with late_to_connect(engine.endpoint, 1.5) as late:
        engine.endpoint = late
        world.fleet.publish(engine)
        with capture_logs() as logs:
            samples = await asyncio.gather(*(world.generate() for _ in range(32)))
    assert len(samples) == 32
    assert not [line for line in logs if line["event"] == "engine_declined"]


@asynccontextmanager
async def late_to_connect(endpoint: str, seconds: float) -> AsyncIterator[str]:
    """An address before `endpoint` whose connections get their first byte so late."""
    host, _, port = endpoint.rpartition(":")

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(seconds)
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(carry(reader, far_writer, 0.0, 0.0), carry(far_reader, writer, 0.0, 0.0))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


def _is_only_route(world: World, engine_id: str) -> bool:
    routes = world.client.routes
    return routes is not None and [r.engine_id for r in routes.routes] == [engine_id]
