"""A writer by hand: one small version's bytes, and the stream that brings them to an engine agent, frame by frame."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import xxhash

from controlplane.core.layout import DType, Layout, TensorSpec, content_digest
from controlplane.rpc.codec import layout_to_parts
from tests.support.eventually import PATIENCE_SECONDS
from weightplane.v1 import layout_pb2, weight_update_pb2, weight_update_pb2_grpc

SHAPES = {"a": (1000,), "b": (3, 5)}
LAYOUT = Layout(tuple(TensorSpec(name, DType.F32, shape) for name, shape in SHAPES.items()))
Request = weight_update_pb2.UpdateWeightsRequest


@dataclass
class Weights:
    """One version's bytes."""

    parts: list[bytes] = field(default_factory=lambda: [os.urandom(t.byte_count) for t in LAYOUT.tensors])

    @property
    def checksums(self) -> list[bytes]:
        return [xxhash.xxh3_64_digest(p) for p in self.parts]

    @property
    def digest(self) -> bytes:
        return content_digest(self.checksums)


class Stream:
    """One UpdateWeights stream, frame by frame."""

    def __init__(self, channel: grpc.aio.Channel, opened: weight_update_pb2.UpdateOpen) -> None:
        self.version = opened.version
        self._call: Any = weight_update_pb2_grpc.WeightUpdateStub(channel).UpdateWeights()
        self._opened = opened

    async def open(self) -> weight_update_pb2.UpdateAccepted:
        await self.send(open=self._opened)
        response = await self.read()
        return response.accepted

    async def send(self, **frame: Any) -> None:
        await self._call.write(Request(**frame))

    async def read(self) -> weight_update_pb2.UpdateWeightsResponse:
        """The next answer. Raises AioRpcError when the stream was ended with an error."""
        response = await asyncio.wait_for(self._call.read(), PATIENCE_SECONDS)
        if response is grpc.aio.EOF:
            code = await self._call.code()
            raise grpc.aio.AioRpcError(
                code,
                await self._call.initial_metadata(),
                await self._call.trailing_metadata(),
                await self._call.details(),
            )
        assert isinstance(response, weight_update_pb2.UpdateWeightsResponse)
        return response

    async def layout(self) -> None:
        for part in layout_to_parts(LAYOUT):
            part.version.CopyFrom(self.version)
            await self.send(layout_part=part)

    async def chunk(self, weights: Weights, index: int, tensors: Sequence[int]) -> None:
        """A chunk of whole tensors, inline."""
        records, data = [], b""
        for t in tensors:
            records.append(
                weight_update_pb2.TensorRecord(
                    tensor=t,
                    tensor_offset=0,
                    buffer_offset=len(data),
                    byte_count=len(weights.parts[t]),
                    checksum=weights.checksums[t],
                )
            )
            data += weights.parts[t]
        buffers = [layout_pb2.BufferHandle(inline=data)]
        await self.send(
            chunk=weight_update_pb2.Chunk(version=self.version, index=index, records=records, buffers=buffers)
        )

    async def commit(self, weights: Weights, **changed: Any) -> None:
        values: dict[str, Any] = {
            "chunk_count": 2,
            "byte_count": LAYOUT.byte_count,
            "content_digest": weights.digest,
        } | changed
        await self.send(commit=weight_update_pb2.Commit(version=self.version, **values))

    async def until_ready(self, weights: Weights) -> None:
        """Everything up to `ready`."""
        if (await self.open()).layout_needed:
            await self.layout()
        await self.chunk(weights, 0, [0])
        await self.chunk(weights, 1, [1])
        while (await self.read()).WhichOneof("frame") != "ready":
            pass

    async def end(self) -> None:
        """No more frames: an end without a word."""
        await self._call.done_writing()

    def cut(self) -> None:
        """The writer dies."""
        self._call.cancel()
