"""When a version is served, and what a check compares: with a coordinator and engines that say what the test says."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controlplane.core import errors as e
from tests.support.refusals import rpc_error
from trainer_agent.agent.serving import Serving, compare, first_routes
from trainer_agent.agent.stubs import Stubs
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import engine_pb2, fleet_pb2, fleet_pb2_grpc, lifecycle_pb2, version_pb2

REQUEST = fleet_pb2.WatchRoutesRequest(model="policy")
DIGEST = b"d" * 32


def version(number: int) -> version_pb2.WeightVersion:
    return version_pb2.WeightVersion(term=1, number=number)


def ref(engine: str, incarnation: str = "i") -> version_pb2.EngineRef:
    return version_pb2.EngineRef(engine_id=engine, incarnation=incarnation)


class Call:
    """One stream: routes as {engine: number}, or what breaks it."""

    def __init__(self, said: list[dict[str, int] | Exception]) -> None:
        self._said = said
        self.cancelled = False

    async def __aiter__(self) -> AsyncIterator[fleet_pb2.WatchRoutesResponse]:
        for routes in self._said:
            if isinstance(routes, Exception):
                raise routes
            made = [fleet_pb2.Route(engine=ref(name), applied=version(n)) for name, n in routes.items()]
            yield fleet_pb2.WatchRoutesResponse(routes=made)

    def cancel(self) -> None:
        self.cancelled = True


class Fleet:
    """One call after the other."""

    def __init__(self, *calls: Call) -> None:
        self.calls = list(calls)

    def WatchRoutes(self, request: fleet_pb2.WatchRoutesRequest) -> Call:
        return self.calls.pop(0)


async def routes(*said: list[dict[str, int] | Exception]) -> list[str]:
    """Of version 7."""
    calls = [Call(each) for each in said]
    found = await first_routes(cast("fleet_pb2_grpc.FleetAsyncStub", Fleet(*calls)), REQUEST, version(7))
    assert all(call.cancelled for call in calls)
    return found


async def test_the_first_engines_with_just_the_version_are_named() -> None:
    assert await routes([{}, {"e0": 6}, {"e0": 6, "e1": 7}]) == ["e1"]


async def test_a_later_version_ends_the_looking() -> None:
    assert await routes([{"e0": 6}, {"e0": 8}]) == []


async def test_a_broken_stream_is_looked_at_again_and_a_refusal_is_the_end() -> None:
    assert await routes([rpc_error()], [{"e0": 7}]) == ["e0"]
    assert await routes([rpc_error(e.WrongRun(expected="a", got="b"))]) == []


# ---- the check ----------------------------------------------------------------------------------


class Engines:
    """What each engine agent answers, by endpoint."""

    def __init__(self, answers: dict[str, engine_pb2.EngineStatus | Exception]) -> None:
        self._answers = answers
        self._endpoint = ""

    def lifecycle(self, endpoint: str) -> Engines:
        made = Engines(self._answers)
        made._endpoint = endpoint
        return made

    async def GetStatus(
        self, request: lifecycle_pb2.GetStatusRequest, timeout: float
    ) -> lifecycle_pb2.GetStatusResponse:
        answer = self._answers[self._endpoint]
        if isinstance(answer, Exception):
            raise answer
        return lifecycle_pb2.GetStatusResponse(status=answer)


def status(number: int = 7, digest: bytes = DIGEST, incarnation: str = "i") -> engine_pb2.EngineStatus:
    return engine_pb2.EngineStatus(engine=ref("e0", incarnation), applied=version(number), content_digest=digest)


async def check(answer: engine_pb2.EngineStatus | Exception, **outcome: Any) -> e.CheckFailed | None:
    stage: dict[str, Any] = {"stage": engine_pb2.UPDATE_STAGE_APPLIED} | outcome
    state = fleet_pb2.UpdateState(update_id="u", version=version(7))
    state.engines.add(engine=ref("e0"), **stage)
    assignment = fleet_pb2.Assignment(engine=ref("e0"), endpoint="there")
    return await compare(cast("Stubs", Engines({"there": answer})), "run", state, DIGEST, [assignment])


async def test_an_engine_that_holds_just_what_was_pushed_passes() -> None:
    assert await check(status()) is None


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (status(number=6), "e0 holds 1.6"),
        (status(digest=b"x" * 32), "e0 holds other content (787878787878, not 646464646464)"),
        (status(incarnation="j"), "e0 is another life (j, not i)"),
        (engine_pb2.EngineStatus(engine=ref("e0")), "e0 holds no version"),
        (rpc_error(), "e0 does not say what it holds"),
    ],
)
async def test_one_that_does_not_is_named_with_what_it_says(
    answer: engine_pb2.EngineStatus | Exception, said: str
) -> None:
    wrong = await check(answer)
    assert wrong is not None
    assert said in wrong.differences
    assert "1.7 was committed, and 1 of 1 engines do not hold it now" in str(wrong)


async def test_an_engine_that_the_report_names_as_without_it_is_not_asked() -> None:
    assert await check(status(number=6), stage=engine_pb2.UPDATE_STAGE_FAILED) is None
    assert await check(status(number=6), lost=True) is None


class _Watched:
    """A coordinator whose routes must not be asked for."""

    def WatchRoutes(self, request: fleet_pb2.WatchRoutesRequest) -> Call:
        raise AssertionError("nobody asked when it is served")


@pytest.mark.parametrize("asked", [{}, {"serving": True}, {"check": True}, {"detached": True}])
async def test_routes_are_watched_after_a_commit_only_if_a_rank_may_ask(asked: dict[str, bool]) -> None:
    context: Any = SimpleNamespace(run_id="run", model="policy", stubs=SimpleNamespace(fleet=_Watched()))
    serving, ranks, push = Serving(cast(Any, SimpleNamespace(members={})), context), {}, cast(Any, None)
    ranks[0] = rank_pb2.PushBegin(step=1, **asked)  # type: ignore[arg-type]
    serving.follow(push, ranks, fleet_pb2.UpdateState(), 1.0)
    assert (serving._task is not None) is bool(asked)
    await serving.close()
