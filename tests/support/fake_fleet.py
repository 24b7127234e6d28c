"""A coordinator that only tells routes, and engines that only follow a script: for tests of the rollout client.

Both are served by the real `controlplane.rpc.server`, so validation and errors are the real ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc

from controlplane.core import errors as e
from controlplane.core.lag import FleetCommit
from controlplane.core.versions import Term, WeightVersion
from controlplane.rpc.codec import commit_to_proto, version_to_proto
from controlplane.rpc.server import RunningServer, start_server
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc, rollout_pb2, rollout_pb2_grpc, version_pb2

RUN = "run-a"

Script = Callable[[rollout_pb2.GenerateRequest], AsyncIterator[rollout_pb2.GenerateResponse]]


def version(number: int) -> WeightVersion:
    return WeightVersion(number=number, term=Term(1))


class FakeFleet(fleet_pb2_grpc.FleetServicer):
    """Publishes routes to any number of watchers."""

    def __init__(self, run_id: str = RUN) -> None:
        self.run_id = run_id
        self.watchers = 0
        self._routes: list[fleet_pb2.Route] = []
        self._commits: list[fleet_pb2.FleetCommit] = []
        self._revision = 0
        self._changed = asyncio.Event()

    def commits(self, *numbers: int) -> None:
        """The fleet came to serve these versions, one after the other; told with the next `publish`."""
        ordinals = enumerate(numbers, len(self._commits) + 1)
        self._commits += [commit_to_proto(FleetCommit(version(number), ordinal)) for ordinal, number in ordinals]

    def publish(self, *engines: FakeEngine) -> None:
        self._routes = [engine.route() for engine in engines]
        self._revision += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def WatchRoutes(
        self, request: fleet_pb2.WatchRoutesRequest, context: Any
    ) -> AsyncIterator[fleet_pb2.WatchRoutesResponse]:
        if request.run_id not in ("", self.run_id):
            raise e.WrongRun(expected=self.run_id, got=request.run_id)
        with self._watching():
            while True:
                changed = self._changed
                yield fleet_pb2.WatchRoutesResponse(
                    run_id=self.run_id, revision=self._revision, routes=self._routes, commits=self._commits
                )
                await changed.wait()

    @contextmanager
    def _watching(self) -> Iterator[None]:
        self.watchers += 1
        try:
            yield
        finally:
            self.watchers -= 1


@dataclass
class FakeEngine(rollout_pb2_grpc.RolloutServicer):
    """Answers each request by its script."""

    engine_id: str
    script: Script
    applied: WeightVersion | None = field(default_factory=lambda: version(1))
    live_requests: int = 0
    max_requests: int = 0
    endpoint: str = ""
    requests: list[rollout_pb2.GenerateRequest] = field(default_factory=list)
    running: int = 0
    peak: int = 0
    said: int = 0
    """Messages that it has got rid of."""
    aborted: dict[str, asyncio.Event] = field(default_factory=dict)
    """By the request's name."""
    deaf: bool = False
    """It hears no abort."""

    def route(self) -> fleet_pb2.Route:
        return fleet_pb2.Route(
            engine=version_pb2.EngineRef(engine_id=self.engine_id, incarnation=f"{self.engine_id}-1"),
            endpoint=self.endpoint,
            applied=None if self.applied is None else version_to_proto(self.applied),
            live_requests=self.live_requests,
            max_requests=self.max_requests,
        )

    async def Generate(
        self, request: rollout_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        self.requests.append(request)
        self.running += 1
        self.peak = max(self.peak, self.running)
        abort = self.aborted.setdefault(request.request_id, asyncio.Event())
        said: list[rollout_pb2.GenerateResponse] = []
        try:
            async for response in _until(abort, self.script(request)):
                said.append(response)
                yield response
                self.said += 1
            if abort.is_set() and not any(response.HasField("finish") for response in said):
                yield finish(*_spans(said), reason="ABORT", stop_reason="aborted")
        finally:
            self.running -= 1

    async def Score(self, request: rollout_pb2.ScoreRequest, context: Any) -> rollout_pb2.ScoreResponse:
        """Minus each token's id; its script may refuse."""
        async for _ in self.script(rollout_pb2.GenerateRequest(request_id=request.request_id)):
            pass
        assert self.applied is not None
        scored = [-float(token) for token in request.token_ids[1:]]
        return rollout_pb2.ScoreResponse(logprobs=scored, version=version_to_proto(self.applied))

    async def Abort(self, request: rollout_pb2.AbortRequest, context: Any) -> rollout_pb2.AbortResponse:
        """Says that it ended all that are its own requests' names."""
        if self.deaf:
            raise e.EngineDied(engine_id=self.engine_id, cause="killed")
        asked = {r.request_id for r in self.requests}
        ended = [name for name in request.request_ids if name in asked]
        for name in ended:
            self.aborted.setdefault(name, asyncio.Event()).set()
        return rollout_pb2.AbortResponse(request_ids=ended)


async def _until(
    abort: asyncio.Event, script: AsyncIterator[rollout_pb2.GenerateResponse]
) -> AsyncIterator[rollout_pb2.GenerateResponse]:
    """What a script says until it ends or is aborted."""
    stop, following = asyncio.create_task(abort.wait()), None
    try:
        while True:
            following = asyncio.ensure_future(anext(script, None))
            await asyncio.wait({following, stop}, return_when=asyncio.FIRST_COMPLETED)
            if not following.done() or (response := following.result()) is None:
                return
            yield response
    finally:
        for task in (stop, following):
            if task is not None:
                task.cancel()


def _spans(said: list[rollout_pb2.GenerateResponse]) -> Iterator[tuple[int, int, int]]:
    start = 0
    for response in said:
        yield response.version.number, start, start + len(response.token_ids)
        start += len(response.token_ids)


def new_fleet(run_id: str = RUN) -> FakeFleet:
    return FakeFleet(run_id)  # type: ignore[abstract]  # its other calls are of no use to a rollout client


async def serve_fleet(fleet: FakeFleet, listen: str = "127.0.0.1:0") -> RunningServer:
    def register(server: grpc.aio.Server) -> str:
        fleet_pb2_grpc.add_FleetServicer_to_server(fleet, server)
        return "weightplane.v1.Fleet"

    return await start_server(listen, [register])


async def serve_engine(engine: FakeEngine) -> RunningServer:
    def register(server: grpc.aio.Server) -> str:
        rollout_pb2_grpc.add_RolloutServicer_to_server(engine, server)
        return "weightplane.v1.Rollout"

    running = await start_server("127.0.0.1:0", [register])
    engine.endpoint = running.address
    return running


def tokens(*ids: int, made_by: int = 1) -> rollout_pb2.GenerateResponse:
    """A message with tokens, each with a logprob of minus its id."""
    return rollout_pb2.GenerateResponse(
        token_ids=ids, logprobs=[-float(i) for i in ids], version=version_to_proto(version(made_by))
    )


def finish(*spans: tuple[int, int, int], reason: str = "LENGTH", stop_reason: str = "") -> rollout_pb2.GenerateResponse:
    """The last message; spans are (number, start, end)."""
    return rollout_pb2.GenerateResponse(
        finish=rollout_pb2.Finish(
            reason=rollout_pb2.FinishReason.Value(f"FINISH_REASON_{reason}"),
            stop_reason=stop_reason,
            prompt_tokens=3,
            cached_prompt_tokens=2,
            spans=[
                rollout_pb2.VersionSpan(version=version_to_proto(version(n)), start=start, end=end)
                for n, start, end in spans
            ],
        )
    )


def says(*responses: rollout_pb2.GenerateResponse) -> Script:
    async def script(request: rollout_pb2.GenerateRequest) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        for response in responses:
            yield response

    return script


def refuses(error: e.WeightplaneError, *before: rollout_pb2.GenerateResponse) -> Script:
    async def script(request: rollout_pb2.GenerateRequest) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        for response in before:
            yield response
        raise error

    return script


def hangs(*before: rollout_pb2.GenerateResponse, until: asyncio.Event | None = None) -> Script:
    """Says `before`, then waits (for `until`, or for ever), then ends well."""

    async def script(request: rollout_pb2.GenerateRequest) -> AsyncIterator[rollout_pb2.GenerateResponse]:
        for response in before:
            yield response
        await (until or asyncio.Event()).wait()
        yield tokens(9)
        yield finish((1, 0, 1))

    return script
