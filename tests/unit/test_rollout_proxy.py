"""The coordinator's Rollout against scripted engines, over real gRPC on both sides; its routes are the test's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from controlplane.coordinator.daemon import CoordinatorSettings
from controlplane.coordinator.rollout_proxy import RolloutProxy
from controlplane.core import errors as e
from controlplane.core.versions import ModelName
from controlplane.rpc.channels import SMALL_WINDOWS, open_channel
from controlplane.rpc.errors import from_rpc_error
from controlplane.rpc.server import start_server
from tests.support.eventually import eventually
from tests.support.fake_fleet import RUN, FakeEngine, Script, finish, hangs, new_fleet, refuses, says, serve_engine
from tests.support.fake_fleet import tokens as said
from weightplane.v1 import fleet_pb2, rollout_pb2, rollout_pb2_grpc

GOOD = says(said(5, 6), said(7, made_by=2), finish((1, 0, 2), (2, 2, 3)))
UNAVAILABLE = e.VersionUnavailable(wanted="1.9", applied="1.1")
MAX_CALLS = 3
FLOW_CONTROL_MESSAGES = 200
"""Of a thousand tokens each: more than small windows hold, and far less than those that gRPC makes by itself."""


class World:
    """A proxy, its engines, and the hub's part that it sees."""

    def __init__(self) -> None:
        self.fleet = new_fleet()
        self.stack = AsyncExitStack()
        self.recovering: e.WeightplaneError | None = None
        self.core = SimpleNamespace(
            models={ModelName("policy"): None}, engines={}, check_recovered=self._check_recovered
        )
        self.proxy = RolloutProxy(self, MAX_CALLS)  # type: ignore[arg-type]
        self.stub: Any

    async def start(self) -> None:
        def register(server: grpc.aio.Server) -> str:
            rollout_pb2_grpc.add_RolloutServicer_to_server(self.proxy, server)
            return "weightplane.v1.Rollout"

        server = await start_server("127.0.0.1:0", [register])
        self.stack.push_async_callback(self.proxy.close)
        self.stack.push_async_callback(server.stop)
        self.stub = rollout_pb2_grpc.RolloutStub(
            await self.stack.enter_async_context(open_channel(server.address, more=SMALL_WINDOWS))
        )

    async def engine(self, name: str, script: Script, **fields: Any) -> FakeEngine:
        engine = FakeEngine(name, script, **fields)
        server = await serve_engine(engine)
        self.stack.push_async_callback(server.stop)
        place = SimpleNamespace(engine_id=name, endpoint=engine.endpoint)
        self.core.engines[name] = SimpleNamespace(
            session=1, place=place, state=SimpleNamespace(model=ModelName("policy"))
        )
        return engine

    # ---- the hub's ----

    def check_run(self, run_id: str) -> None:
        if run_id != RUN:
            raise e.WrongRun(expected=RUN, got=run_id)

    def watch_routes(self, run_id: str, model: str, *, kept: bool) -> Any:
        return self.fleet.WatchRoutes(fleet_pb2.WatchRoutesRequest(run_id=run_id, model=model), None)

    def _check_recovered(self) -> None:
        if self.recovering is not None:
            raise self.recovering


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    await made.start()
    yield made
    await made.stack.aclose()


def asked(*, wait: float = 30.0, name: str = "", n: int = 0, **changed: Any) -> rollout_pb2.GenerateRequest:
    values: dict[str, Any] = {"run_id": RUN, "model": "policy", "prompt_token_ids": [1, 2, 3]}
    sampling = rollout_pb2.SamplingParams(max_tokens=8, n=n)
    request = rollout_pb2.GenerateRequest(request_id=name, sampling=sampling, **(values | changed))
    request.wait.FromMilliseconds(int(wait * 1000))
    return request


async def whole(world: World, request: rollout_pb2.GenerateRequest) -> list[rollout_pb2.GenerateResponse]:
    return [response async for response in world.stub.Generate(request, timeout=60)]


async def refusal(world: World, request: rollout_pb2.GenerateRequest) -> e.WeightplaneError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await whole(world, request)
    return from_rpc_error(raised.value)


async def test_an_engines_messages_are_handed_on_as_they_are(world: World) -> None:
    engine = await world.engine("a", GOOD)
    world.fleet.publish(engine)

    answer = await whole(world, asked(name="mine"))

    assert answer == [said(5, 6), said(7, made_by=2), finish((1, 0, 2), (2, 2, 3))]
    (request,) = engine.requests
    assert (request.request_id, request.model, list(request.prompt_token_ids)) == ("mine", "policy", [1, 2, 3])


@pytest.mark.parametrize(
    "declines",
    [
        refuses(UNAVAILABLE),
        refuses(e.EngineNotReady(engine_id="a", holds="operator")),
        says(finish(reason="ABORT", stop_reason="updating")),
        says(finish(reason="VERSION_CHANGED")),
        says(),
    ],
)
async def test_another_engine_is_asked_while_nothing_was_handed_on(world: World, declines: Script) -> None:
    first = await world.engine("a", declines)
    world.fleet.publish(first, await world.engine("b", GOOD, live_requests=9))

    assert len(await whole(world, asked())) == 3
    assert len(first.requests) == 1


async def test_an_engine_is_waited_for_that_comes_later(world: World) -> None:
    running = asyncio.create_task(whole(world, asked()))
    await eventually(lambda: world.fleet.watchers)
    world.fleet.publish(await world.engine("a", GOOD))

    assert len(await running) == 3


async def test_the_last_engines_refusal_is_told_once_the_wait_has_passed(world: World) -> None:
    engine = await world.engine("a", refuses(UNAVAILABLE))
    world.fleet.publish(engine)

    error = await refusal(world, asked(wait=2.0))

    assert error.metadata() == UNAVAILABLE.metadata()
    assert len(engine.requests) > 1


async def test_inv11_after_the_first_token_no_other_engine_is_asked(world: World) -> None:
    died = e.EngineDied(engine_id="a", cause="it fell over")
    second = await world.engine("b", GOOD, live_requests=9)
    world.fleet.publish(await world.engine("a", refuses(died, said(5, 6))), second)

    call = world.stub.Generate(asked(), timeout=60)
    assert await call.read() == said(5, 6)
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call.read()

    error = from_rpc_error(raised.value)
    assert isinstance(error, e.EngineDied)
    assert error.metadata() == died.metadata()
    assert not second.requests


async def test_an_error_that_this_version_does_not_know_keeps_its_status_and_its_details(world: World) -> None:
    class Newer(FakeEngine):
        async def Generate(self, request: Any, context: Any) -> AsyncIterator[rollout_pb2.GenerateResponse]:
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "a newer engine's word")
            yield said()

    engine = Newer("a", GOOD)
    world.stack.push_async_callback((await serve_engine(engine)).stop)
    world.fleet.publish(engine)

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await whole(world, asked())
    assert (raised.value.code(), raised.value.details()) == (grpc.StatusCode.OUT_OF_RANGE, "a newer engine's word")


async def test_one_call_more_than_the_limit_is_refused_with_both_numbers(world: World) -> None:
    release = asyncio.Event()
    engine = await world.engine("a", hangs(until=release))
    world.fleet.publish(engine)
    running = [asyncio.create_task(whole(world, asked())) for _ in range(MAX_CALLS)]
    await eventually(lambda: engine.running == MAX_CALLS)

    error = await refusal(world, asked())

    assert isinstance(error, e.LimitExceeded)
    assert (error.limit, error.got) == (MAX_CALLS, MAX_CALLS + 1)
    assert len(engine.requests) == MAX_CALLS
    release.set()
    await asyncio.gather(*running)
    assert len(await whole(world, asked())) == 2


async def test_a_caller_that_goes_away_ends_its_request_in_the_engine(world: World) -> None:
    engine = await world.engine("a", hangs(said(5)))
    world.fleet.publish(engine)
    call = world.stub.Generate(asked())
    await call.read()

    call.cancel()

    await eventually(lambda: not engine.running)


async def test_a_callers_deadline_ends_its_request_in_the_engine(world: World) -> None:
    engine = await world.engine("a", hangs(said(5)))
    world.fleet.publish(engine)

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        _ = [r async for r in world.stub.Generate(asked(), timeout=0.5)]

    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await eventually(lambda: not engine.running)


async def test_a_caller_that_reads_nothing_stops_the_engine_and_fills_no_memory(world: World) -> None:
    many = [said(*range(1000)) for _ in range(20 * FLOW_CONTROL_MESSAGES)]
    engine = await world.engine("a", says(*many, finish()))
    world.fleet.publish(engine)
    call = world.stub.Generate(asked())
    await call.read()

    await eventually(lambda: engine.said > 1)
    before = -1
    while engine.said != before:  # what the connections' windows hold
        before = engine.said
        await asyncio.sleep(0.15)

    assert engine.said < FLOW_CONTROL_MESSAGES
    call.cancel()
    await eventually(lambda: not engine.running)


async def test_every_one_of_n_samples_is_handed_on(world: World) -> None:
    parts = [rollout_pb2.GenerateResponse(index=i, token_ids=[i], finish=finish().finish) for i in range(3)]
    world.fleet.publish(await world.engine("a", says(*parts)))

    assert await whole(world, asked(n=3)) == parts


async def test_unknown_runs_and_models_are_refused_at_once(world: World) -> None:
    assert isinstance(await refusal(world, asked(run_id="other")), e.WrongRun)
    error = await refusal(world, asked(model="nobody"))
    assert isinstance(error, e.WrongModel)
    assert (error.expected, error.got) == ("policy", "nobody")


async def test_a_coordinator_that_waits_for_reports_says_that_it_does(world: World) -> None:
    world.recovering = e.CoordinatorRecovering(term=2, engines=["e0"])

    error = await refusal(world, asked(wait=0.2))

    assert isinstance(error, e.CoordinatorRecovering)
    assert error.engines == ["e0"]


async def test_scores_come_from_an_engine_that_does_not_decline(world: World) -> None:
    first = await world.engine("a", refuses(UNAVAILABLE))
    world.fleet.publish(first, await world.engine("b", says(), live_requests=9))

    request = rollout_pb2.ScoreRequest(run_id=RUN, model="policy", token_ids=[3, 4, 5])
    answer = await world.stub.Score(request, timeout=60)

    assert list(answer.logprobs) == [-4.0, -5.0]


async def test_an_abort_reaches_every_engine_and_what_waits_here(world: World) -> None:
    engine = await world.engine("a", hangs(said(5)), max_requests=1)
    world.fleet.publish(engine)
    running = world.stub.Generate(asked(name="running"))
    await running.read()
    waiting = asyncio.create_task(refusal(world, asked(name="waiting")))
    await eventually(lambda: len(world.proxy._calls) == 2)

    request = rollout_pb2.AbortRequest(run_id=RUN, model="policy", request_ids=["running", "waiting", "nobody's"])
    answer = await world.stub.Abort(request, timeout=60)

    assert sorted(answer.request_ids) == ["running", "waiting"]
    assert isinstance(await waiting, e.RequestAborted)
    running.cancel()


async def test_an_abort_that_an_engine_did_not_hear_is_an_error(world: World) -> None:
    await world.engine("a", GOOD)
    world.core.engines["a"].place.endpoint = "127.0.0.1:1"

    request = rollout_pb2.AbortRequest(run_id=RUN, model="policy", request_ids=["mine"])
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await world.stub.Abort(request, timeout=60)

    error = from_rpc_error(raised.value)
    assert isinstance(error, e.PeerLost)
    assert error.peer == "a"


async def test_a_sample_ended_by_its_caller_before_its_first_token_is_asked_of_nobody_else(world: World) -> None:
    second = await world.engine("b", GOOD, live_requests=9)
    world.fleet.publish(await world.engine("a", says(finish(reason="ABORT", stop_reason="aborted"))), second)

    assert await whole(world, asked()) == [finish(reason="ABORT", stop_reason="aborted")]
    assert not second.requests


def test_a_limit_below_zero_is_refused() -> None:
    with pytest.raises(e.InvalidRequest, match="max_rollout_calls"):
        CoordinatorSettings(max_rollout_calls=-1)
