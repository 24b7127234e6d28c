"""Asking for an update and for the lease, with a coordinator that answers as the test says."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import grpc
import pytest
from structlog.testing import capture_logs

from controlplane.core import errors as e
from tests.support.refusals import rpc_error
from trainer_agent.agent.begin import begin_update
from trainer_agent.agent.session import FleetSession
from weightplane.v1 import fleet_pb2, fleet_pb2_grpc

REPEATED = e.RequestRepeated(request_id="r", update_id="u", version="1.1")
REGRESSED = e.LedgerRegressed(what="number", known=3, seen=5, who="e0")
GRANTED = fleet_pb2.BeginUpdateResponse(update_id="granted")


class Coordinator:
    """Refuses as long as there are refusals left; notes the request ids."""

    def __init__(self, *refusals: e.WeightplaneError | None) -> None:
        self.refusals = list(refusals)
        self.asked: list[str] = []

    async def BeginUpdate(self, request: fleet_pb2.BeginUpdateRequest, timeout: float) -> fleet_pb2.BeginUpdateResponse:
        self.asked.append(request.request_id)
        if self.refusals:
            raise rpc_error(self.refusals.pop(0))
        return GRANTED


async def begin(coordinator: Coordinator, *, seconds: float = 20.0, first: bool = True) -> str:
    request = fleet_pb2.BeginUpdateRequest(request_id="r")
    stub = cast("fleet_pb2_grpc.FleetAsyncStub", coordinator)
    deadline = asyncio.get_running_loop().time() + seconds
    return (await begin_update(stub, request, deadline, first=first)).update_id


async def test_the_same_request_is_repeated_while_nobody_answers() -> None:
    coordinator = Coordinator(None, e.CoordinatorRecovering(term=2, engines=["e0"]))
    assert await begin(coordinator) == "granted"
    assert coordinator.asked == ["r", "r", "r"]


async def test_a_request_that_was_decided_long_ago_is_made_anew_once() -> None:
    coordinator = Coordinator(REPEATED)
    assert await begin(coordinator) == "granted"
    assert coordinator.asked[0] == "r"
    assert coordinator.asked[1] not in ("", "r")
    with pytest.raises(e.RequestRepeated):
        await begin(Coordinator(REPEATED, REPEATED))


async def test_an_older_ledger_is_waited_for_until_the_pushs_limit_and_named() -> None:
    assert await begin(Coordinator(REGRESSED)) == "granted"
    with capture_logs() as logs, pytest.raises(e.DeadlineExceeded) as raised:
        await begin(Coordinator(*[REGRESSED] * 9), seconds=0.5)
    assert "weightplane ledger accept" in raised.value.waited_for
    assert {(line["event"], line["log_level"]) for line in logs} == {("begin_waits", "warning")}


async def test_inv_7_a_coordinator_that_knows_an_older_term_does_not_fence() -> None:
    assert await begin(Coordinator(e.StaleTerm(model="policy", got=5, current=3))) == "granted"
    with pytest.raises(e.StaleTerm):
        await begin(Coordinator(e.StaleTerm(model="policy", got=3, current=5)))


# ---- the welcome ----


class Stream:
    """A session's call: answers, then silence."""

    def __init__(self, *frames: fleet_pb2.SessionResponse) -> None:
        self._frames = list(frames)
        self.sent: list[fleet_pb2.SessionRequest] = []
        self.beaten = asyncio.Event()

    def __call__(self) -> Stream:
        return self

    @property
    def Session(self) -> Stream:
        return self

    async def write(self, frame: fleet_pb2.SessionRequest) -> None:
        self.sent.append(frame)
        if frame.HasField("trainer_status"):
            self.beaten.set()

    async def read(self) -> Any:
        if self._frames:
            return self._frames.pop(0)
        await asyncio.Event().wait()
        return grpc.aio.EOF

    def cancel(self) -> None: ...


class Events:
    def __init__(self) -> None:
        self.terms: list[int] = []

    def welcomed(self, incarnation: str, welcome: fleet_pb2.Welcome) -> None:
        self.terms.append(welcome.trainer_term)

    def waiting(self, incarnation: str, error: e.WeightplaneError) -> None: ...

    def refused(self, incarnation: str, error: e.WeightplaneError) -> None: ...


async def test_a_state_of_the_fleet_that_comes_before_the_welcome_is_no_lease() -> None:
    welcome = fleet_pb2.Welcome(trainer_term=4)
    welcome.heartbeat_interval.FromSeconds(1)
    stream = Stream(
        fleet_pb2.SessionResponse(fleet_state=fleet_pb2.FleetState(revision=1)),
        fleet_pb2.SessionResponse(welcome=welcome),
    )
    told = Events()
    session = FleetSession(
        cast("fleet_pb2_grpc.FleetAsyncStub", stream),
        fleet_pb2.TrainerHello(incarnation="i"),
        lambda: fleet_pb2.TrainerStatus(term=4),
        told,
    )
    session.start()
    async with asyncio.timeout(5):
        await stream.beaten.wait()
    await session.close(None)
    assert told.terms == [4]
