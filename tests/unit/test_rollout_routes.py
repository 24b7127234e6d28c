"""Where the rollout client sends a request: fewest requests, pins, waiting for routes, a coordinator that is away,
and the connections behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
from structlog.testing import capture_logs

from controlplane.core import errors as e
from controlplane.core.sample_spans import Span
from tests.support.eventually import eventually
from tests.support.fake_fleet import finish, hangs, says, serve_fleet, tokens, version
from tests.support.rollout_world import GOOD, World
from tests.support.slow_link import carry


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    yield made
    await made.stack.aclose()


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
