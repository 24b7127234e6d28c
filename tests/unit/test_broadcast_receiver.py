"""The broadcast's receiver: bytes go straight to their places where that is safe, through a buffer elsewhere."""

from __future__ import annotations

import os
import threading

import pytest
import xxhash

from controlplane.core.assembly import Record
from controlplane.core.errors import (
    ByteCountMismatch,
    ChecksumMismatch,
    FrameInvalid,
    UnsupportedByEngine,
    UpdateAborted,
)
from controlplane.core.layout import DType, Layout, TensorSpec
from engine_agent.receivers import Incoming, make_receiver
from engine_agent.receivers.broadcast import BroadcastReceiver
from engine_agent.receivers.delta import PatchedStaging
from engine_agent.receivers.links import LinkPlace, ReceiverLink
from engine_agent.receivers.port import Buffer
from engine_agent.receivers.staging import Staging
from weightplane.v1 import weight_update_pb2

LAYOUT = Layout(tuple(TensorSpec(n, DType.U8, (s,)) for n, s in (("a", 100), ("b", 7), ("c", 300))))
PLACES = [0, 128, 192]
"""Where staging has them: each at the next multiple of 64."""
A, B, C = os.urandom(100), os.urandom(7), os.urandom(300)
SUM = b"x" * 8


class FakeLink(ReceiverLink):
    """Gives what a test says the sender sends."""

    def __init__(self, *chunks: bytes) -> None:
        super().__init__(LinkPlace("id", "h:1", 2, 1, 1), "e0")
        self.targets: list[memoryview] = []
        self._chunks = list(chunks)
        self._in_use = True

    def receive(self, target: memoryview, stage: str = "bytes") -> None:
        data = self._chunks.pop(0)
        assert len(target) == len(data)
        target[:] = data
        self.targets.append(target)


def receiver(link: ReceiverLink) -> BroadcastReceiver:
    return BroadcastReceiver(Staging(LAYOUT), link)


def held(made: BroadcastReceiver, tensor: int) -> bytes:
    start = PLACES[tensor]
    return bytes(made._staging.view[start : start + LAYOUT.tensors[tensor].byte_count])


def link_bytes(count: int) -> list[Buffer]:
    return [Buffer("", link_bytes=count)]


def test_a_run_of_whole_places_goes_straight_into_the_staging() -> None:
    link = FakeLink(A + bytes(28) + B + bytes(57), C[:256], C[256:] + bytes(20))
    made = receiver(link)
    made.place([Record(0, 0, 0, 100, SUM), Record(1, 0, 128, 7, SUM)], link_bytes(192))
    made.place([Record(2, 0, 0, 256, None)], link_bytes(256))
    made.place([Record(2, 256, 0, 44, SUM)], link_bytes(64))
    assert [held(made, i) for i in range(3)] == [A, B, C]
    assert all(t.obj is made._staging._map for t in link.targets)
    del link
    made.close()


@pytest.mark.parametrize(
    ("records", "chunk"),
    [
        ([Record(0, 0, 0, 100, SUM), Record(2, 0, 192, 300, SUM)], A + b"!" * 92 + C + bytes(20)),
        ([Record(0, 0, 0, 100, SUM), Record(2, 0, 100, 300, SUM)], A + C),
        ([Record(0, 0, 5, 100, SUM), Record(2, 0, 128, 300, SUM)], b"!" * 5 + A + b"!" * 23 + C),
        ([Record(0, 0, 0, 100, SUM)], A + b"!" * 60),
    ],
)
def test_a_chunk_with_other_gaps_than_the_staging_never_overwrites_what_lies_between(
    records: list[Record], chunk: bytes
) -> None:
    made = receiver(FakeLink(B, chunk))
    made.place([Record(1, 0, 0, 7, SUM)], link_bytes(7))
    made.place(records, link_bytes(len(chunk)))
    assert held(made, 1) == B
    assert [held(made, r.tensor) for r in records] == [[A, B, C][r.tensor] for r in records]
    made.close()


def test_an_empty_chunk_asks_nothing_of_the_link() -> None:
    made = receiver(FakeLink())
    made.place([], link_bytes(0))
    made.close()


def test_what_came_is_compared_with_what_was_sent() -> None:
    made = receiver(FakeLink(B))
    made.place([Record(1, 0, 0, 7, SUM)], link_bytes(7))
    made.check(1, xxhash.xxh3_64_digest(B))
    with pytest.raises(ChecksumMismatch):
        made.check(1, xxhash.xxh3_64_digest(A))
    made.close()


def test_bytes_that_come_otherwise_and_chunks_larger_than_everything_are_refused() -> None:
    made = receiver(FakeLink())
    with pytest.raises(FrameInvalid, match="on the link"):
        made.place([], [Buffer("", inline=b"")])
    with pytest.raises(ByteCountMismatch, match="chunk on the link"):
        made.place([], link_bytes(1 << 40))
    made.close()


@pytest.mark.parametrize(("chunks", "left"), [([B], True), ([A + bytes(28) + B + bytes(57) + C + bytes(20)], False)])
def test_a_link_is_left_unless_everything_came(chunks: list[bytes], left: bool) -> None:
    """Else its next bytes would be those of the chunk that nobody took."""
    link = FakeLink(*chunks)
    made = receiver(link)
    every = [Record(0, 0, 0, 100, SUM), Record(1, 0, 128, 7, SUM), Record(2, 0, 192, 300, SUM)]
    made.place([Record(1, 0, 0, 7, SUM)] if left else every, link_bytes(len(chunks[0])))
    made.close()
    assert link.left is left


@pytest.mark.parametrize("left", [True, False])
def test_a_delta_goes_through_a_buffer_and_is_all_there_with_its_empty_last_chunk(left: bool) -> None:
    base = Staging(LAYOUT)
    base.copy(
        [Record(0, 0, 0, 100, SUM), Record(1, 0, 100, 7, SUM), Record(2, 0, 107, 300, SUM)], memoryview(A + B + C)
    )
    changed = bytes([3, 0, 0, 0, A[3] ^ 1])
    link = FakeLink(changed + bytes(3) + B[::-1])
    made = BroadcastReceiver(PatchedStaging(LAYOUT, base.staged("1")), link)
    base.close()
    made.place([Record(0, 0, 0, 5, SUM, 1), Record(1, 0, 8, 7, SUM)], link_bytes(15))
    assert [held(made, i) for i in range(3)] == [A[:3] + bytes([A[3] ^ 1]) + A[4:], B[::-1], C]
    if not left:
        made.place([], link_bytes(0))
    made.close()
    assert link.left is left


def test_closing_waits_for_no_broadcast_and_what_comes_later_is_nobodys() -> None:
    begun, go_on, errors = threading.Event(), threading.Event(), []

    class Slow(FakeLink):
        def receive(self, target: memoryview, stage: str = "bytes") -> None:
            begun.set()
            assert go_on.wait(60)

    made = receiver(Slow())

    def place() -> None:
        try:
            made.place([Record(1, 0, 0, 7, SUM)], link_bytes(7))
        except UpdateAborted as error:
            errors.append(error.reason)

    thread = threading.Thread(target=place)
    thread.start()
    assert begun.wait(60)
    made.close()
    go_on.set()
    thread.join(60)
    assert errors == ["UPDATE_ABORTED"]


@pytest.mark.parametrize(
    "transport",
    [
        weight_update_pb2.TRANSPORT_CUDA_IPC,
        weight_update_pb2.TRANSPORT_BROADCAST,
        weight_update_pb2.TRANSPORT_CHECKPOINT,
    ],
)
def test_there_is_no_receiver_for_a_transport_that_is_not_known_or_has_no_link(
    transport: weight_update_pb2.Transport.ValueType,
) -> None:
    with pytest.raises(UnsupportedByEngine, match=r"e0 cannot do this: receive by "):
        make_receiver(Incoming(transport, LAYOUT, "e0", "host", ("d0",)))
