"""An agent and its members over real gRPC, without vLLM: who is let in, what arrives, and who is missed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import xxhash

from controlplane.core.errors import DeadlineExceeded, InstallFailed, PeerLost
from controlplane.core.layout import DType, Layout, TensorSpec
from controlplane.exit_codes import ExitCode
from controlplane.rpc.channels import open_channel
from controlplane.rpc.errors import from_rpc_error
from controlplane.rpc.server import RunningServer, start_server
from engine_agent.engine import Placement, SegmentSpan, StagedWeights
from engine_agent.members.head import MemberLink, Members
from engine_agent.members.member import Copy, MemberSettings, run_member
from engine_agent.vllm.further_nodes import FurtherNodes
from engine_agent.vllm.settings import VllmSettings
from tests.support.eventually import eventually
from weightplane.local.v1 import member_pb2, member_pb2_grpc

RUN, ENGINE = "run", "engine-0"
UUIDS = ("cpu-0", "cpu-1")


def register(members: Members) -> object:
    def add(server: object) -> str:
        member_pb2_grpc.add_EngineMembersServicer_to_server(members, server)  # type: ignore[arg-type]
        return member_pb2.DESCRIPTOR.services_by_name["EngineMembers"].full_name

    return add


@asynccontextmanager
async def head(wanted: int = 1) -> AsyncIterator[tuple[Members, RunningServer]]:
    members = Members(RUN, ENGINE, wanted)
    server = await start_server("127.0.0.1:0", [register(members)])  # type: ignore[list-item]
    try:
        yield members, server
    finally:
        members.release()
        await server.stop()


@asynccontextmanager
async def member(server: RunningServer, run_id: str = RUN, engine_id: str = ENGINE) -> AsyncIterator[asyncio.Task[int]]:
    stop = asyncio.Event()
    settings = MemberSettings(engine_id, server.address, "127.0.0.1", run_id)
    task = asyncio.create_task(run_member(settings, stop))
    try:
        yield task
    finally:
        stop.set()
        await asyncio.wait_for(task, 60)


def file_of(directory: Path, name: str, data: bytes) -> str:
    (directory / name).write_bytes(data)
    return str(directory / name)


def spans_in(directory: Path) -> list[SegmentSpan]:
    """Odd sizes and offsets, more than one frame, nothing at all, and one file twice."""
    large = file_of(directory, "large", bytes(i % 251 for i in range((1 << 20) + 12345)))
    small = file_of(directory, "small", b"0123456789")
    return [
        SegmentSpan(large, 64, (1 << 20) + 12000),
        SegmentSpan(small, 3, 5),
        SegmentSpan(small, 0, 0),
        SegmentSpan(large, 0, 1),
    ]


def read(span: SegmentSpan) -> bytes:
    with open(span.path, "rb") as file:
        file.seek(span.offset)
        return file.read(span.byte_count)


async def only(members: Members) -> MemberLink:
    (link,) = await members.gather(60)
    return link


async def test_what_a_member_holds_is_what_was_sent_span_by_span_and_aligned(tmp_path: Path) -> None:
    spans = spans_in(tmp_path)
    async with head() as (members, server), member(server):
        link = await only(members)
        for _ in range(3):
            held = await link.put(spans)
            assert [read(h) for h in held] == [read(s) for s in spans]
            assert {h.offset % 64 for h in held} == {0}
            assert {h.path for h in held}.isdisjoint(s.path for s in spans)
            await link.drop()


@pytest.mark.parametrize(("run_id", "engine_id"), [("another", ENGINE), (RUN, "engine-9")])
async def test_l7_a_member_of_another_run_or_engine_is_sent_away_for_good(run_id: str, engine_id: str) -> None:
    async with head() as (members, server), member(server, run_id, engine_id) as task:
        assert await asyncio.wait_for(asyncio.shield(task), 60) == ExitCode.CONFIG
        with pytest.raises(DeadlineExceeded, match="0 of 1 members"):
            await members.gather(0.0)


async def test_whoever_says_nothing_at_all_is_told_that_a_hello_was_expected() -> None:
    async with head() as (_, server), open_channel(server.address) as channel:
        stub: Any = member_pb2_grpc.EngineMembersStub(channel)
        call = stub.Attach()
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
    assert from_rpc_error(ended.value).metadata() == {"expected": "hello", "got": "the end"}


async def test_a_member_too_many_waits_outside_until_one_is_gone() -> None:
    async with head() as (members, server), member(server):
        first = await only(members)
        async with member(server) as second:
            await asyncio.sleep(0)
            assert not second.done()
            first.lose("the test says so")
            await eventually(lambda: members._links not in ([], [first]))


async def test_g4_a_start_says_how_many_members_it_waits_for() -> None:
    async with head(wanted=2) as (members, server), member(server):
        await eventually(lambda: len(members._links) == 1)
        with pytest.raises(DeadlineExceeded, match="1 of 2 members"):
            await members.gather(0.0)


async def test_inv4_a_member_that_is_lost_before_it_held_everything_fails_the_install_untouched(tmp_path: Path) -> None:
    layout = Layout((TensorSpec("w", DType.U8, (5,)),))
    spans = spans_in(tmp_path)[1:2]
    staged = StagedWeights(layout, "1", {"": spans}, [Placement(0, 0)])
    further = FurtherNodes(Members(RUN, ENGINE, 1), VllmSettings(tmp_path, data_parallel_size=2), ENGINE)
    async with head() as (members, server), member(server):
        further._links = [await only(members)]
        async with further.holding(staged, UUIDS) as everywhere:
            assert everywhere.chunks.keys() == {"", "cpu-1"}
            assert read(everywhere.chunks["cpu-1"][0]) == b"34567"
        lost: list[str] = []
        further.watch(lost.append)
        further._links[0].lose("the cable")
        await eventually(lambda: len(lost) == 1)
        assert "the cable" in lost[0]
        with pytest.raises(InstallFailed, match=r"touched: False.*the cable"):
            async with further.holding(staged, UUIDS):
                pass


async def test_a_stopped_member_is_missed_and_comes_again_for_the_next_life() -> None:
    async with head() as (members, server):
        async with member(server):
            first = await only(members)
        await eventually(first.lost.done)
        async with member(server):
            second = await only(members)
            members.release()
            await eventually(lambda: members._links not in ([], [second]))
        with pytest.raises(PeerLost):
            await first.drop()


@pytest.mark.parametrize("spoilt", [b"01234", b"0123456", b"01x3456789"], ids=["short", "shorter", "changed"])
def test_m3_a_members_copy_is_held_only_if_it_is_what_was_sent(spoilt: bytes) -> None:
    sent = b"0123456789"
    copy = Copy(len(sent))
    copy.write(spoilt)
    held = copy.held(xxhash.xxh3_64_digest(sent))
    copy.drop()
    assert not held.path
    assert "not what was sent" in held.problem
