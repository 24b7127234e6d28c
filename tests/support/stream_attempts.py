"""A trainer agent's stream to an engine agent that follows a script, and one attempt at it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from controlplane.core import errors as e
from controlplane.core.layout import DType, Layout, TensorSpec
from controlplane.rpc.channels import open_channel
from controlplane.rpc.codec import layout_to_parts
from controlplane.rpc.server import start_server
from tests.support.eventually import PATIENCE_SECONDS
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


async def until(frames: AsyncIterator[Any], kind: str) -> None:
    async for frame in frames:
        if frame.WhichOneof("frame") == kind:
            return


def refusing(error: e.WeightplaneError, after: str) -> Script:
    """Refuses at the first frame of a kind."""

    async def script(_agent: FakeAgent, frames: AsyncIterator[Any]) -> AsyncIterator[Response]:
        await until(frames, "open")
        if after != "open":
            yield ACCEPTED
            await until(frames, "chunk")
            if after == "commit":
                yield READY
                await until(frames, "commit")
        raise error

    return script


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
