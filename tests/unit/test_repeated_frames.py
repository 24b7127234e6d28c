"""A stream's frame that is byte for byte the one before it costs one comparison; any other is decoded and validated."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from controlplane.core.errors import FrameInvalid
from controlplane.rpc.server import REPEATED_BYTES, _checked_stream
from weightplane.v1 import fleet_pb2

Frame = fleet_pb2.SessionRequest


def goodbye(reason: str) -> bytes:
    return Frame(goodbye=fleet_pb2.Goodbye(reason=reason)).SerializeToString()


async def came(*frames: bytes) -> tuple[list[Frame], int]:
    """What a handler sees, and how many were decoded."""
    decoded = []

    def decode(data: bytes) -> Frame:
        decoded.append(data)
        return Frame.FromString(data)

    async def stream() -> AsyncIterator[bytes]:
        for data in frames:
            yield bytes(bytearray(data))  # gRPC makes each anew

    return [frame async for frame in _checked_stream(decode, stream())], len(decoded)


async def test_a_frame_that_says_the_same_is_the_same_object_and_is_decoded_once() -> None:
    seen, decoded = await came(goodbye("a"), goodbye("a"), goodbye("b"), goodbye("b"), goodbye("a"))
    assert [f.goodbye.reason for f in seen] == ["a", "a", "b", "b", "a"]
    assert decoded == 3
    assert seen[0] is seen[1]
    assert seen[2] is seen[3]
    assert seen[4] is not seen[0]


async def test_every_other_frame_is_validated() -> None:
    with pytest.raises(FrameInvalid):
        await came(goodbye("a"), goodbye("a"), Frame().SerializeToString())


async def test_of_large_frames_none_is_kept() -> None:
    large = Frame(goodbye=fleet_pb2.Goodbye(reason="x")).SerializeToString()
    padded = large + _unknown_field(REPEATED_BYTES)
    _, decoded = await came(padded, padded)
    assert decoded == 2


def _unknown_field(size: int) -> bytes:
    """One that the schema does not have, as a later peer may send it."""
    length = bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14])
    return bytes([0xFA, 0x7F]) + length + bytes(size)
