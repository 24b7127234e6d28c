"""A version's bytes on every transport, in any number of chunks, and one attempt to bring them to one engine."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from controlplane.core.errors import WeightplaneError
from controlplane.devices import SHARED_MEMORY, host_id
from controlplane.rpc.errors import from_rpc_error
from tests.support.writer import LAYOUT, Stream, Weights
from weightplane.v1 import layout_pb2, version_pb2, weight_update_pb2

Transport: TypeAlias = weight_update_pb2.Transport.ValueType
INLINE = weight_update_pb2.TRANSPORT_INLINE
SHARED = weight_update_pb2.TRANSPORT_SHARED_MEMORY


class Segments:
    """Shared-memory segments that this test made; gone with it."""

    def __init__(self) -> None:
        self._made: list[Path] = []

    def make(self, data: bytes) -> str:
        path = SHARED_MEMORY / f"weightplane-case-{secrets.token_hex(8)}"
        path.write_bytes(data)
        self._made.append(path)
        return path.name

    def close(self) -> None:
        for path in self._made:
            path.unlink(missing_ok=True)


Buffers = Callable[[int, int], layout_pb2.BufferHandle]
"""The handle of the bytes start ≤ i < end of a version."""


def _inline(data: bytes, segments: Segments) -> Buffers:
    return lambda start, end: layout_pb2.BufferHandle(inline=data[start:end])


def _shared_memory(data: bytes, segments: Segments) -> Buffers:
    name = segments.make(data)

    def buffer(start: int, end: int) -> layout_pb2.BufferHandle:
        place = layout_pb2.SharedMemoryRange(segment=name, host_id=host_id(), offset=start, byte_count=end - start)
        return layout_pb2.BufferHandle(shared_memory=place)

    return buffer


CARRIERS: dict[Transport, Callable[[bytes, Segments], Buffers]] = {INLINE: _inline, SHARED: _shared_memory}
"""How a version's bytes are handed over by each transport. V1 fails while a transport of the contract is not here."""
TRANSPORTS = [
    t for t in weight_update_pb2.Transport.values() if t != weight_update_pb2.TRANSPORT_UNSPECIFIED and t in CARRIERS
]


def transport_name(transport: Transport) -> str:
    return weight_update_pb2.Transport.Name(transport).removeprefix("TRANSPORT_").lower()


class Cargo:
    """One version's bytes in `count` chunks, by one transport."""

    def __init__(self, weights: Weights, segments: Segments, transport: Transport = INLINE, count: int = 2) -> None:
        self.weights = weights
        self.transport = transport
        self.count = count
        data = b"".join(weights.parts)
        self._buffers = CARRIERS[transport](data, segments)
        self._cuts = [len(data) * i // count for i in range(count + 1)]

    def bytes_until(self, index: int) -> int:
        """How many bytes the chunks up to and including `index` have."""
        return self._cuts[index + 1]

    def chunk(self, version: version_pb2.WeightVersion, index: int) -> weight_update_pb2.Chunk:
        start, end = self._cuts[index], self._cuts[index + 1]
        return weight_update_pb2.Chunk(
            version=version, index=index, records=self._records(start, end), buffers=[self._buffers(start, end)]
        )

    def _records(self, start: int, end: int) -> list[weight_update_pb2.TensorRecord]:
        records, place = [], 0
        for index, tensor in enumerate(LAYOUT.tensors):
            first, last = max(start, place), min(end, place + tensor.byte_count)
            if first < last:
                record = weight_update_pb2.TensorRecord(
                    tensor=index, tensor_offset=first - place, buffer_offset=first - start, byte_count=last - first
                )
                if last == place + tensor.byte_count:
                    record.checksum = self.weights.checksums[index]
                records.append(record)
            place += tensor.byte_count
        return records


class Delivery:
    """One attempt to bring a cargo to one engine, frame by frame."""

    def __init__(self, stream: Stream, cargo: Cargo) -> None:
        self.stream = stream
        self.cargo = cargo

    async def open(self) -> None:
        """Up to the first chunk."""
        if (await self.stream.open()).layout_needed:
            await self.stream.layout()

    async def chunk(self, index: int) -> None:
        await self.stream.send(chunk=self.cargo.chunk(self.stream.version, index))

    async def until_ready(self) -> None:
        await self.open()
        for index in range(self.cargo.count):
            await self.chunk(index)
        await self.wait_for("ready")

    async def commit(self) -> None:
        await self.stream.commit(self.cargo.weights, chunk_count=self.cargo.count)

    async def applied(self) -> weight_update_pb2.UpdateApplied:
        return (await self.wait_for("applied")).applied

    async def wait_for(self, kind: str) -> weight_update_pb2.UpdateWeightsResponse:
        """The next answer of a kind. Raises AioRpcError when the stream was refused."""
        while (response := await self.stream.read()).WhichOneof("frame") != kind:
            pass
        return response

    async def send_anyway(self, **frame: Any) -> None:
        """A frame of a writer that does not look whether its stream still stands."""
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self.stream.send(**frame)

    async def refusal(self) -> WeightplaneError:
        """Read on until the stream is ended by an error."""
        try:
            while True:
                await self.stream.read()
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)


LOST_WORDS = "REMOTE"
"""What a writer hears in place of its refusal if it was writing just then (grpc/grpc#36066, grpcio 1.85): see P4."""


@contextmanager
def refusals(*reasons: str) -> Iterator[list[WeightplaneError]]:
    """The call inside must be refused for one of these reasons. The list gets the refusal."""
    got: list[WeightplaneError] = []
    try:
        yield got
    except grpc.aio.AioRpcError as error:
        got.append(from_rpc_error(error))
    assert got, f"nothing was refused; {reasons} was expected"
    assert got[0].reason in reasons, str(got[0])
