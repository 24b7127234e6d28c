"""gloo's own limit: the same bytes from one process to another by a process group of torch's, with nothing around it.

Also the other end of our own link by itself (`link_receiver`): joined, and then only told to receive.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from subprocess import PIPE, Popen
from typing import Any

import structlog
import torch
import torch.distributed as dist

from engine_agent.receivers.links import LinkPlace, ReceiverLink
from trainer_agent.rank.links import LinkKey, SenderLink
from weightplane.v1 import weight_update_pb2

ENGINE = ("e0", "life-0")
GO = b"\n"
LIMIT = timedelta(seconds=60)
_c10d: Any = dist


def nothing() -> None:
    """Between two looks of a wait."""


class Receiver:
    """A process at the other end; it receives all pieces each time that it is told."""

    def __init__(self, kind: str, address: str, sizes: Sequence[int]) -> None:
        command = [sys.executable, "-m", __name__, kind, address, *map(str, sizes)]
        self._process = Popen(command, stdin=PIPE, stdout=PIPE)

    def begin(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(GO)
        self._process.stdin.flush()

    def wait(self) -> None:
        """Until it says that all came."""
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"received\n":
            raise SystemExit("the receiver died")

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)


@contextmanager
def raw_pair(pieces: Sequence[torch.Tensor]) -> Iterator[Any]:
    """A function that broadcasts the pieces once by raw gloo; it returns the seconds."""
    store = _c10d.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    receiver = Receiver("raw", f"127.0.0.1:{store.port}", [p.numel() for p in pieces])
    group = _c10d.ProcessGroupGloo(store, 0, 2, LIMIT)
    try:
        receiver.wait()
        yield lambda: _timed(receiver, lambda: _broadcast_all(group, pieces))
    finally:
        receiver.close()


@contextmanager
def link_pair(pieces: Sequence[torch.Tensor]) -> Iterator[Any]:
    """The same through a link of ours: `SenderLink` here, `ReceiverLink` there."""
    link = SenderLink(LinkKey("bench", (ENGINE,), weight_update_pb2.LINK_FATE_PER_ENGINE, "127.0.0.1"))
    receiver = Receiver("link", f"{link.link_id}/{link.rendezvous}", [p.numel() for p in pieces])
    try:
        while not link.met():
            time.sleep(0.01)
        link.connect(nothing)
        receiver.wait()
        yield lambda: _timed(receiver, lambda: _send_all(link, pieces))
    finally:
        link.close()
        receiver.close()


def _timed(receiver: Receiver, send: Any) -> float:
    receiver.begin()
    started = time.perf_counter()
    send()
    receiver.wait()
    return time.perf_counter() - started


def _broadcast_all(group: Any, pieces: Sequence[torch.Tensor]) -> None:
    for piece in pieces:
        group.broadcast(piece, 0).wait()


def _send_all(link: SenderLink, pieces: Sequence[torch.Tensor]) -> None:
    for index, piece in enumerate(pieces):
        link.send(index, piece, nothing)
    link.wait_sent(len(pieces), nothing)


# ---- the other end ------------------------------------------------------------------------------


def _receive_raw(address: str, targets: Sequence[torch.Tensor]) -> Any:
    host, _, port = address.partition(":")
    group = _c10d.ProcessGroupGloo(_c10d.TCPStore(host, int(port), None, False, wait_for_workers=False), 1, 2, LIMIT)
    return lambda: _broadcast_all(group, targets)


def _receive_link(address: str, targets: Sequence[torch.Tensor]) -> Any:
    link_id, _, rendezvous = address.partition("/")
    link = ReceiverLink(LinkPlace(link_id, rendezvous, size=2, position=1, term=1), ENGINE[0])
    link.join()
    arrays: list[Any] = [target.numpy() for target in targets]
    views = [memoryview(array) for array in arrays]

    def receive() -> None:
        for view in views:
            link.receive(view)

    return receive


def main() -> None:
    """raw or link, where to, and the sizes of the pieces."""
    kind, address, *sizes = sys.argv[1:]
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    targets = [torch.zeros(int(size), dtype=torch.uint8) for size in sizes]
    receive = (_receive_raw if kind == "raw" else _receive_link)(address, targets)
    print("received", flush=True)  # it is there
    while sys.stdin.buffer.read(len(GO)):
        receive()
        print("received", flush=True)


if __name__ == "__main__":
    main()
