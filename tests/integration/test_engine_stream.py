"""One stream to a scripted engine agent: when commit frames go (INV-3), and when memory counts as free (INV-12)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from controlplane.core import errors as e
from controlplane.core.layout import DType, Layout, TensorSpec
from controlplane.rpc.channels import open_channel
from controlplane.rpc.codec import layout_to_parts
from controlplane.rpc.server import start_server
from tests.support.eventually import PATIENCE_SECONDS, eventually
from trainer_agent.agent.chunk_log import ChunkLog
from trainer_agent.agent.stream import Cargo, EngineStream, StreamEnd
from trainer_agent.agent.watch import UpdateWatch
from weightplane.local.v1 import rank_pb2
from weightplane.v1 import fleet_pb2, layout_pb2, version_pb2, weight_update_pb2, weight_update_pb2_grpc

VERSION = version_pb2.WeightVersion(term=1, number=7)
LAYOUT = Layout((TensorSpec("a", DType.U8, (4,)),))
Response = weight_update_pb2.UpdateWeightsResponse
Script = Callable[["FakeAgent", AsyncIterator[Any]], AsyncIterator[Response]]

ACCEPTED = Response(accepted=weight_update_pb2.UpdateAccepted(version=VERSION, layout_needed=True))
ATTACHED = Response(accepted=weight_update_pb2.UpdateAccepted(version=VERSION, attached=True))
READY = Response(ready=weight_update_pb2.UpdateReady(version=VERSION))
APPLIED = Response(applied=weight_update_pb2.UpdateApplied(version=VERSION, content_digest=b"c" * 32))


class FakeAgent(weight_update_pb2_grpc.WeightUpdateServicer):
    """Follows one script per attempt, and notes the frames that it got."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = list(scripts)
        self.frames: list[list[str]] = []
        self.abort_reasons: list[str] = []

    async def UpdateWeights(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[Response]:
        script = self._scripts.pop(0)
        self.frames.append([])
        async for response in script(self, self._noted(request_iterator)):
            yield response

    async def _noted(self, frames: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for frame in frames:
            kind = frame.WhichOneof("frame")
            self.frames[-1].append(kind)
            if kind == "abort":
                self.abort_reasons.append(frame.abort.reason)
                raise e.UpdateAborted(update_id="u", cause=frame.abort.reason)
            yield frame


async def _until(frames: AsyncIterator[Any], kind: str) -> None:
    async for frame in frames:
        if frame.WhichOneof("frame") == kind:
            return


async def obliging(_agent: FakeAgent, frames: AsyncIterator[Any]) -> AsyncIterator[Response]:
    """Takes everything."""
    await _until(frames, "open")
    yield ACCEPTED
    await _until(frames, "chunk")
    yield Response(chunk_released=weight_update_pb2.ChunkReleased(version=VERSION, index=0))
    yield READY
    await _until(frames, "commit")
    yield APPLIED


def refusing(error: e.WeightplaneError, after: str) -> Script:
    """Refuses at the first frame of a kind."""

    async def script(_agent: FakeAgent, frames: AsyncIterator[Any]) -> AsyncIterator[Response]:
        await _until(frames, "open")
        if after != "open":
            yield ACCEPTED
            await _until(frames, "chunk")
            if after == "commit":
                yield READY
                await _until(frames, "commit")
        raise error

    return script


async def vanishing_after_chunk(_agent: FakeAgent, frames: AsyncIterator[Any]) -> AsyncIterator[Response]:
    """Breaks off without a word of its own, as a connection does."""
    await _until(frames, "open")
    yield ACCEPTED
    await _until(frames, "chunk")
    raise RuntimeError("gone")


async def silent_after_commit(_agent: FakeAgent, frames: AsyncIterator[Any]) -> AsyncIterator[Response]:
    """Ends the stream after the commit frame, its install going on without it."""
    await _until(frames, "open")
    yield ACCEPTED
    await _until(frames, "chunk")
    yield READY
    await _until(frames, "commit")


async def attaching(_agent: FakeAgent, frames: AsyncIterator[Any]) -> AsyncIterator[Response]:
    """The update was committed before: gives its outcome."""
    await _until(frames, "open")
    yield ATTACHED
    yield APPLIED


class Attempt:
    """A stream under test: its log, its watch, its running task."""

    def __init__(self, stream: EngineStream, chunks: ChunkLog, watch: UpdateWatch) -> None:
        self.stream = stream
        self.chunks = chunks
        self.watch = watch
        self.task = asyncio.create_task(stream.run())

    def export(self) -> None:
        """The leader announces its one chunk and its end."""
        self.announce(0)
        self.chunks.finish(rank_pb2.PushEnd(chunk_count=1, byte_count=4, content_digest=b"c" * 32))

    def announce(self, index: int, records: int = 1) -> None:
        place = layout_pb2.SharedMemoryRange(segment="weightplane-s", host_id="h", offset=0, byte_count=64)
        chunk = rank_pb2.SendChunk(index=index, buffers=[layout_pb2.BufferHandle(shared_memory=place)])
        for _ in range(records):
            chunk.records.add(tensor=0, tensor_offset=0, buffer_offset=0, byte_count=4, checksum=b"checksum")
        self.chunks.add(chunk)

    async def stalls(self) -> bool:
        """It has sent something, and now the connection takes no more."""
        before = self.stream.sent_bytes
        await asyncio.sleep(0.2)
        return 0 < self.stream.sent_bytes == before

    async def phase(self, phase: fleet_pb2.UpdatePhase.ValueType) -> None:
        await self.watch.take(fleet_pb2.UpdateState(update_id="u", phase=phase))

    async def end(self) -> StreamEnd:
        return await asyncio.wait_for(self.task, PATIENCE_SECONDS)


@asynccontextmanager
async def attempt(agent: FakeAgent) -> AsyncIterator[Attempt]:
    def register(server: Any) -> str:
        weight_update_pb2_grpc.add_WeightUpdateServicer_to_server(agent, server)
        return "weightplane.v1.WeightUpdate"

    server = await start_server("127.0.0.1:0", [register])
    channel = open_channel(server.address)
    head = weight_update_pb2.UpdateOpen(run_id="r", model="m", update_id="u", writer_term=1, version=VERSION)
    head.manifest.layout_digest, head.manifest.tensor_count, head.manifest.byte_count = LAYOUT.digest, 1, 4
    assignment = fleet_pb2.Assignment(
        engine=version_pb2.EngineRef(engine_id="e0", incarnation="i"),
        required=True,
        transport=weight_update_pb2.TRANSPORT_SHARED_MEMORY,
    )
    chunks = ChunkLog()
    begun = fleet_pb2.BeginUpdateResponse(update_id="u", version=VERSION)
    watch = UpdateWatch(None, "r", begun)  # type: ignore[arg-type]  # driven by hand
    stub: Any = weight_update_pb2_grpc.WeightUpdateStub(channel)
    stream = EngineStream(stub, Cargo(head, tuple(layout_to_parts(LAYOUT))), assignment, chunks, watch)
    made = Attempt(stream, chunks, watch)
    try:
        yield made
    finally:
        made.task.cancel()
        await asyncio.gather(made.task, return_exceptions=True)
        await channel.close()
        await server.stop()


async def test_no_commit_frame_goes_before_the_coordinators_go() -> None:
    agent = FakeAgent(obliging)
    async with attempt(agent) as running:
        running.export()
        await eventually(lambda: running.stream.ready)
        assert agent.frames == [["open", "layout_part", "chunk"]]
        await running.phase(fleet_pb2.UPDATE_PHASE_GO)
        assert await running.end() == StreamEnd(None, memory_free=True)
        assert agent.frames[0][-1] == "commit"


async def test_an_engine_that_is_ready_after_the_decision_still_comes_to_the_served_version() -> None:
    agent = FakeAgent(obliging)
    async with attempt(agent) as running:
        await running.phase(fleet_pb2.UPDATE_PHASE_COMMITTED)
        running.export()
        assert (await running.end()).error is None


async def test_a_failed_update_is_given_up_by_a_word_and_its_memory_is_free_once_confirmed() -> None:
    agent = FakeAgent(obliging)
    async with attempt(agent) as running:
        running.export()
        await eventually(lambda: running.stream.ready)
        await running.phase(fleet_pb2.UPDATE_PHASE_FAILED)
        end = await running.end()
        assert isinstance(end.error, e.UpdateAborted)
        assert end.memory_free
        assert agent.frames == [["open", "layout_part", "chunk", "abort"]]


async def test_an_abort_in_mid_stream_carries_its_reason_and_no_commit() -> None:
    agent = FakeAgent(obliging)
    async with attempt(agent) as running:
        await eventually(lambda: bool(agent.frames) and "layout_part" in agent.frames[0])
        running.stream.abort("rank 1 went away")
        end = await running.end()
        assert end.memory_free
        assert agent.abort_reasons == ["rank 1 went away"]


CHUNKS = 100
"""Of 4096 records each: more than a connection takes while nobody reads."""


async def test_inv12_an_abort_that_meets_a_write_still_carries_its_reason_and_is_confirmed() -> None:
    """The agent reads on only after the abort: the chunk's write is under way when it comes."""
    read_on = asyncio.Event()

    async def slow(_agent: FakeAgent, frames: AsyncIterator[Any]) -> AsyncIterator[Response]:
        await _until(frames, "open")
        yield ACCEPTED
        await _until(frames, "layout_part")
        await read_on.wait()
        await _until(frames, "commit")

    agent = FakeAgent(slow)
    async with attempt(agent) as running:
        await eventually(lambda: bool(agent.frames) and "layout_part" in agent.frames[0])
        for index in range(CHUNKS):
            running.announce(index, records=4096)
        await eventually(running.stalls)
        running.stream.abort("rank 1 went away")
        asyncio.get_running_loop().call_later(0.2, read_on.set)
        end = await running.end()
        assert 1 <= agent.frames[0].count("chunk") < CHUNKS
        assert agent.abort_reasons == ["rank 1 went away"]
        assert isinstance(end.error, e.UpdateAborted)
        assert end.memory_free


@pytest.mark.parametrize("after", ["open", "chunk"])
async def test_a_refusal_before_the_commit_frees_the_memory_and_is_final(after: str) -> None:
    refusal = e.ShapeMismatch(name="a", expected=(5,), got=(4,))
    async with attempt(FakeAgent(refusing(refusal, after))) as running:
        running.export()
        end = await running.end()
        assert str(end.error) == str(refusal)
        assert end.memory_free


async def test_a_failed_install_leaves_the_memory_in_doubt() -> None:
    failure = e.InstallFailed(engine_id="e0", version="1.7", touched=True, cause="x")
    async with attempt(FakeAgent(refusing(failure, "commit"))) as running:
        running.export()
        await running.phase(fleet_pb2.UPDATE_PHASE_GO)
        end = await running.end()
        assert isinstance(end.error, e.InstallFailed)
        assert not end.memory_free


async def test_a_stream_that_broke_without_the_agents_word_leaves_the_memory_in_doubt() -> None:
    async with attempt(FakeAgent(vanishing_after_chunk)) as running:
        running.export()
        end = await running.end()
        assert not end.memory_free


async def test_a_busy_engine_is_asked_again_from_the_first_chunk_on() -> None:
    busy = e.UpdateInProgress(update_id="other", version="1.6")
    agent = FakeAgent(refusing(busy, "open"), refusing(busy, "open"), obliging)
    async with attempt(agent) as running:
        running.export()
        await running.phase(fleet_pb2.UPDATE_PHASE_GO)
        assert (await running.end()).error is None
        assert agent.frames == [["open"], ["open"], ["open", "layout_part", "chunk", "commit"]]


async def test_after_the_commit_a_broken_stream_attaches_and_gets_the_outcome() -> None:
    agent = FakeAgent(silent_after_commit, attaching)
    async with attempt(agent) as running:
        running.export()
        await running.phase(fleet_pb2.UPDATE_PHASE_GO)
        assert await running.end() == StreamEnd(None, memory_free=True)
        assert agent.frames == [["open", "layout_part", "chunk", "commit"], ["open"]]


async def test_an_abort_after_the_commit_only_ends_the_waiting() -> None:
    async def never(_agent: FakeAgent, frames: AsyncIterator[Any]) -> AsyncIterator[Response]:
        async for response in silent_after_commit(_agent, frames):
            yield response
        await asyncio.sleep(60)

    agent = FakeAgent(never)
    async with attempt(agent) as running:
        running.export()
        await running.phase(fleet_pb2.UPDATE_PHASE_GO)
        await eventually(lambda: bool(agent.frames) and agent.frames[0][-1] == "commit")
        running.stream.abort("the push is over")
        end = await running.end()
        assert not end.memory_free
        assert agent.abort_reasons == []
