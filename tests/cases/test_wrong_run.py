"""L7: a job that reached another run's processes. Read off the descriptors: whoever adds an RPC is met here.

Each RPC of each service is called with requests in which all is right but the run. What the running processes serve is
asked of themselves by reflection.
"""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
import re
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor, OneofDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

import weightplane.v1
from controlplane.core.errors import WeightplaneError, WrongRun
from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import RunId
from controlplane.exit_codes import ExitCode
from controlplane.rollout.client import RolloutClient
from controlplane.rpc.errors import from_rpc_error
from tests.cases.fleet import CaseFleet, case_fleet
from tests.cases.samples import PROMPT, WITHIN
from tests.support.local_fleet import RUN
from tests.support.toy_rank import Script
from tests.support.toy_trainer import fleet_for_toys, toy_trainer
from tests.support.writer import LAYOUT, Weights
from weightplane.v1 import fleet_pb2, rules_pb2, version_pb2

OTHERS = ["another-run", RUN.upper(), f"{RUN} ", f"{RUN}-2"]
"""Run ids that are not this run's; some nearly."""
SILENT, WELCOME = "SILENT", "OK"
COMES_AFTER = {"engine_status": "engine_hello"}
"""Frames that name a run and are not the first of their stream."""


# ---- what the contract has ----------------------------------------------------------------------


def methods() -> Iterator[MethodDescriptor]:
    """Every RPC of every service of the contract."""
    for module in pkgutil.iter_modules(weightplane.v1.__path__):
        if module.name.endswith("_pb2"):
            file = importlib.import_module(f"weightplane.v1.{module.name}").DESCRIPTOR
            for service in file.services_by_name.values():
                yield from service.methods


def places(message: Descriptor, seen: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where in a request a run is named: paths of field names."""
    if message.full_name in seen:
        return
    for field in message.fields:
        if field.name == "run_id":
            yield (field.name,)
        elif field.message_type is not None and not field.is_repeated:
            for path in places(field.message_type, (*seen, message.full_name)):
                yield (field.name, *path)


@dataclass(frozen=True)
class Case:
    """One RPC, and one place where its request names the run."""

    method: MethodDescriptor
    path: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.method.containing_service.name}.{self.method.name}:{'.'.join(self.path)}"

    @property
    def field(self) -> FieldDescriptor:
        message = self.method.input_type
        for name in self.path[:-1]:
            inner = message.fields_by_name[name].message_type
            assert inner is not None
            message = inner
        return message.fields_by_name[self.path[-1]]

    @property
    def may_be_empty(self) -> bool:
        """An empty run id stands for the one that is asked."""
        return not self.field.GetOptions().Extensions[rules_pb2.rules].required


CASES = [Case(method, path) for method in methods() for path in places(method.input_type)]
OPENING = [case for case in CASES if case.path[0] not in COMES_AFTER]
LATER = [case for case in CASES if case.path[0] in COMES_AFTER]


# ---- requests in which all is right -------------------------------------------------------------


@dataclass
class Facts:
    """What a right request says in this fleet, by message type or by the field's name."""

    messages: dict[str, Message]
    values: dict[str, Any]

    def fill(self, message: Message, path: tuple[str, ...]) -> None:
        """Set every required field, and what lies on the way to `path`."""
        for field in fields_of(message):
            rules = field.GetOptions().Extensions[rules_pb2.rules]
            chosen = path[:1] == (field.name,) or (rules.required and _choice(field) is None)
            if field.name in self.values or chosen or self._is_first_of_its_oneof(message, field, path):
                self._set(message, field, rules, path[1:] if path[:1] == (field.name,) else ())

    def _is_first_of_its_oneof(self, message: Message, field: FieldDescriptor, path: tuple[str, ...]) -> bool:
        oneof = _choice(field)
        if oneof is None or not oneof.GetOptions().Extensions[rules_pb2.oneof_rules].required:
            return False
        names = [f.name for f in oneof.fields]
        return names[0] == field.name and path[:1] not in [(n,) for n in names]

    def _set(
        self, message: Message, field: FieldDescriptor, rules: rules_pb2.FieldRules, path: tuple[str, ...]
    ) -> None:
        if field.message_type is not None:
            place = getattr(message, field.name)
            one = place.add() if field.is_repeated else place
            one.SetInParent()
            known = self.messages.get(field.message_type.full_name)
            if known is not None:
                one.CopyFrom(known)
            else:
                self.fill(one, path)
            return
        value = self.values.get(field.name, _plain_value(field, rules))
        if field.is_repeated:
            getattr(message, field.name).append(value)
        else:
            setattr(message, field.name, value)


def fields_of(message: Message) -> list[FieldDescriptor]:
    descriptor: Any = message.DESCRIPTOR
    return list(descriptor.fields)


def _choice(field: FieldDescriptor) -> OneofDescriptor | None:
    """The oneof that a field is one of; what `optional` makes of a field is none."""
    oneof = field.containing_oneof
    return None if oneof is None or oneof.name == f"_{field.name}" else oneof


def _plain_value(field: FieldDescriptor, rules: rules_pb2.FieldRules) -> Any:
    if field.enum_type is not None:
        return field.enum_type.values[1].number
    if field.type == FieldDescriptor.TYPE_BYTES:
        return b"x" * max(rules.min_length, 1)
    if field.type == FieldDescriptor.TYPE_STRING:
        assert not rules.pattern or re.fullmatch(rules.pattern, "x"), f"say in Facts what {field.full_name} is"
        return "x"
    return max(rules.min, 1)


class Caller:
    """Calls any RPC of the contract in one fleet."""

    def __init__(self, fleet: CaseFleet, begun: fleet_pb2.BeginUpdateResponse, endpoints: list[str]) -> None:
        self._fleet = fleet
        self._endpoints = endpoints
        engine = begun.plan.assignments[0].engine
        self._facts = Facts(
            messages={"weightplane.v1.EngineRef": engine, "weightplane.v1.WeightVersion": begun.version},
            values={
                "run_id": RUN,
                "model": "policy",
                "term": fleet.term,
                "writer_term": fleet.term,
                "update_id": begun.update_id,
                "layout_digest": LAYOUT.digest,
                "tensor_count": len(LAYOUT.tensors),
                "byte_count": LAYOUT.byte_count,
                "owner": "me",
            },
        )
        self._stranger = version_pb2.EngineRef(engine_id="stranger", incarnation="life")

    async def answers(self, case: Case, run_id: str, within: float = WITHIN) -> list[WeightplaneError | str]:
        """What each process that serves the RPC says to it, in so many seconds."""
        found = [
            e for e in self._endpoints if case.method.containing_service.full_name in await served_at(self._fleet, e)
        ]
        assert found, f"nobody in this fleet serves {case.method.full_name}: say here who does"
        return [await self._call(self._fleet.channel(endpoint), case, run_id, within) for endpoint in found]

    async def _call(self, channel: grpc.aio.Channel, case: Case, run_id: str, within: float) -> WeightplaneError | str:
        """Its refusal; or that it let the call in, or said nothing in a while."""
        requests = [self._request(case.method, case.path, run_id)]
        before = COMES_AFTER.get(case.path[0])
        if before is not None:
            requests.insert(0, self._request(case.method, (before,), RUN))
        call = _open(channel, case.method, requests)
        try:
            async with asyncio.timeout(within):
                for _ in requests:
                    if await call.read() is grpc.aio.EOF:
                        await call.code()
            return WELCOME
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)
        except TimeoutError:
            return SILENT
        finally:
            call.cancel()

    def _request(self, method: MethodDescriptor, path: tuple[str, ...], run_id: str) -> Message:
        request: Message = GetMessageClass(method.input_type)()
        facts = Facts(dict(self._facts.messages), dict(self._facts.values))
        if any("engine_" in name for name in path):  # a session: that of an engine which is not yet here
            facts.messages["weightplane.v1.EngineRef"] = self._stranger
        facts.fill(request, path)
        place: Any = request
        for name in path[:-1]:
            place = getattr(place, name)
        if path[-1] == "run_id":
            place.run_id = run_id
        return request


class _Unary:
    """A call with one answer, read as if it were a stream."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def read(self) -> Any:
        return await self._call

    def cancel(self) -> None:
        self._call.cancel()


def _serialized(message: Any) -> bytes:
    return bytes(message.SerializeToString())


def _open(channel: grpc.aio.Channel, method: MethodDescriptor, requests: list[Message]) -> Any:
    kind = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, False): channel.stream_unary,
        (True, True): channel.stream_stream,
    }[(method.client_streaming, method.server_streaming)]
    make: Any = kind(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=_serialized,
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )

    async def frames() -> AsyncIterator[Message]:
        for request in requests:
            yield request
        await asyncio.Event().wait()  # the caller stays

    call = make(frames()) if method.client_streaming else make(requests[0])
    return call if method.server_streaming else _Unary(call)


async def served_at(fleet: CaseFleet, endpoint: str) -> set[str]:
    """Full names of a process's services, by its own word."""
    channel: Any = fleet.channel(endpoint)
    stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    response = await call.read()
    return {s.name for s in response.list_services_response.service}


@pytest.fixture
async def caller(tmp_path: Path) -> AsyncIterator[Caller]:
    async with case_fleet(tmp_path) as fleet:
        await fleet.deliver(Weights())
        endpoints = [fleet.address, (await fleet.engine("e0")).endpoint]
        yield Caller(fleet, await fleet.begin(), endpoints)


# ---- the contract -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [pytest.param(m, id=m.full_name) for m in methods()])
def test_L7_every_rpc_names_its_run(method: MethodDescriptor) -> None:
    """A stream names it in a frame that opens it."""
    named = [c for c in CASES if c.method is method]
    assert named
    assert any(c.path[0] not in COMES_AFTER for c in named)


async def taken(caller: Caller, cases: list[Case]) -> list[str]:
    """What was not refused for its run, though it named another one."""
    found = []
    for case in cases:
        for other in OTHERS:
            for answer in await caller.answers(case, other):
                named = isinstance(answer, WrongRun) and (answer.expected, answer.got) == (RUN, other)
                found += [] if named else [f"{case} of run {other!r}: {answer}"]
    return found


async def test_L7_whatever_names_another_run_is_refused_on_every_rpc(caller: Caller) -> None:
    assert await taken(caller, OPENING) == []


async def test_L7_whatever_names_another_run_later_in_a_stream_is_refused(caller: Caller) -> None:
    assert await taken(caller, LATER) == []


async def test_L7_the_same_requests_with_the_right_run_are_not_refused_for_it(caller: Caller) -> None:
    """So that it is the run which they were refused for. An empty one is this one only where the contract says so."""
    for case in CASES:
        for answer in await caller.answers(case, RUN, within=0.5):
            reason = getattr(answer, "reason", "")
            assert reason not in ("WRONG_RUN", "INVALID_MESSAGE"), f"{case}: {answer}"
        taken_as_ours = case.may_be_empty and case in LATER
        for answer in await caller.answers(case, "", within=0.5 if taken_as_ours else WITHIN):
            reason = getattr(answer, "reason", "")
            assert (reason == "INVALID_MESSAGE") is not case.may_be_empty, f"{case}: {answer}"


# ---- jobs ---------------------------------------------------------------------------------------


async def test_L7_an_engine_agent_of_another_run_ends_and_is_not_in_the_fleet(tmp_path: Path) -> None:
    async with case_fleet(tmp_path, engines=0) as fleet:
        fleet.start_engine_at("stray", run_id="another-run")
        assert await asyncio.wait_for(fleet.tasks.pop("stray"), WITHIN) == ExitCode.CONFIG
        assert await fleet.find_engine("stray") is None


async def test_L7_a_rollout_client_of_another_run_gets_no_token_and_is_told_why(tmp_path: Path) -> None:
    async with case_fleet(tmp_path) as fleet:
        await fleet.deliver(Weights())
        async with RolloutClient(fleet.address, run_id="another-run") as rollouts:
            with pytest.raises(WrongRun) as refusal:
                await rollouts.generate(PROMPT, SamplingSettings(max_tokens=1))
        assert (refusal.value.expected, refusal.value.got) == (RUN, RunId("another-run"))


async def test_L7_a_trainer_of_another_run_pushes_nothing_and_every_rank_is_told_why(tmp_path: Path) -> None:
    async with (
        fleet_for_toys(tmp_path, engines=1) as fleet,
        toy_trainer(fleet.address, run_id="another-run") as trainer,
    ):
        (rank,) = await trainer.start_ranks(Script(), world=1)
        assert await rank.code() == 0
        assert [line["reason"] for line in rank.said("refused")] == ["WRONG_RUN"]
        assert "another-run" in rank.said("refused")[0]["text"]
        view = await fleet.view()
        assert (list(view.updates), list(view.trainers)) == ([], [])
