"""A rank's end of the local socket: blocking, with a deadline on everything, and silent in forked children.

Promises: what the agent said before it went away is read before its going away is reported, so that a fenced
rank learns that it was fenced. Time in which this process itself stood still (SIGSTOP) is not counted
against a deadline: a rank that is continued goes on.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path

from controlplane.core.errors import DeadlineExceeded, PeerLost, WeightplaneError
from trainer_agent import wire
from trainer_agent.forks import let_go_in_children
from weightplane.local.v1 import rank_pb2

SLICE_SECONDS = 0.5
"""Longest single wait. No wait counts for more than a slice, however long the process was stopped in it."""
CONNECT_RETRY_SECONDS = 0.05
RECEIVE_BYTES = 256 * 1024
PEER = "the trainer agent"


class Patience:
    """A deadline that counts only time in which this process could run."""

    def __init__(self, seconds: float) -> None:
        self.total = seconds
        self.left = seconds

    def wait(self, poller: select.poll) -> bool:
        """Wait one slice at most. False: nothing came; look at `left` before waiting again."""
        allowed = min(SLICE_SECONDS, max(self.left, 0.0))
        before = time.monotonic()
        ready = bool(poller.poll(allowed * 1000))
        self.left -= min(time.monotonic() - before, allowed) if ready else allowed
        return ready

    def sleep(self, seconds: float) -> None:
        """Let time pass, and count it."""
        time.sleep(min(seconds, max(self.left, 0.0)))
        self.left -= seconds

    def expired(self, phase: str, waited_for: str) -> DeadlineExceeded:
        return DeadlineExceeded(phase=phase, waited_for=waited_for, waited_seconds=round(self.total, 1))


class RankLink:
    """One connection to the node's trainer agent. Not for use by several threads."""

    def __init__(self, path: Path, patience: Patience, alive: Callable[[], None] | None = None) -> None:
        """Connect; the socket may still have to be made. `alive` raises when waiting for it makes no sense.

        Raises:
            DeadlineExceeded: nobody listens there in time.
        """
        self._socket = _connect(path, patience, alive)
        self._received = bytearray()
        self._owner = os.getpid()
        self._over: WeightplaneError | None = None
        self.aside: Callable[[rank_pb2.RankResponse], bool] | None = None
        """Shown each message as it is read; what it takes (True) is given to nobody else."""
        let_go_in_children(self)

    def send(self, request: rank_pb2.RankRequest, patience: Patience) -> None:
        """Send one message.

        Raises:
            PeerLost: the agent is gone. DeadlineExceeded: it reads nothing.
            Whatever the agent ended the session with, before or now.
        """
        self._check()
        data = memoryview(wire.encode(request))
        poller = self._poller(select.POLLOUT)
        while data:
            if not patience.wait(poller):
                if patience.left <= 0:
                    raise patience.expired("local_send", PEER)
                continue
            try:
                data = data[self._socket.send(data) :]
            except BlockingIOError:
                continue
            except OSError as error:
                self._last_words()
                raise self._end(PeerLost(peer=PEER, cause=error.strerror or str(error))) from error

    def receive(self, patience: Patience, phase: str, waited_for: str) -> rank_pb2.RankResponse:
        """The next message. Raises as `send` does."""
        self._check()
        poller = self._poller(select.POLLIN)
        while (message := self._next()) is None:
            if patience.wait(poller):
                self._fill()
            elif patience.left <= 0:
                raise patience.expired(phase, waited_for)
        return message

    def poll(self) -> rank_pb2.RankResponse | None:
        """A message that is here already. Raises as `send` does."""
        self._check()
        if (message := self._next()) is None and self._poller(select.POLLIN).poll(0):
            self._fill()
            message = self._next()
        return message

    def wait(self, patience: Patience, phase: str, waited_for: str) -> None:
        """Wait a slice for more to read, and read it: `poll` has it then. Raises as `receive` does."""
        self._check()
        if patience.wait(self._poller(select.POLLIN)):
            self._fill()
        elif patience.left <= 0:
            raise patience.expired(phase, waited_for)

    def close(self) -> None:
        self._socket.close()

    def abandon(self) -> None:
        """In a forked child: the connection is the parent's."""
        self._socket.close()

    def _check(self) -> None:
        if os.getpid() != self._owner:
            raise RuntimeError(f"this TrainerRank belongs to process {self._owner}; a forked child cannot use it")
        if self._over is not None:
            raise self._over

    def _poller(self, events: int) -> select.poll:
        poller = select.poll()
        poller.register(self._socket, events)
        return poller

    def _fill(self) -> None:
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            raise self._end(PeerLost(peer=PEER, cause=error.strerror or str(error))) from error
        if not data:
            raise self._end(PeerLost(peer=PEER, cause="it closed the connection"))
        self._received += data

    def _next(self) -> rank_pb2.RankResponse | None:
        """The next whole message that nobody takes aside."""
        while (message := self._whole()) is not None:
            if self.aside is None or not self.aside(message):
                return message
        return None

    def _whole(self) -> rank_pb2.RankResponse | None:
        """Takes one whole message out of what was received; a session's error is raised, now and ever after."""
        if len(self._received) < wire.HEADER_BYTES:
            return None
        end = wire.HEADER_BYTES + wire.body_length(bytes(self._received[: wire.HEADER_BYTES]))
        if len(self._received) < end:
            return None
        message = rank_pb2.RankResponse.FromString(bytes(self._received[wire.HEADER_BYTES : end]))
        del self._received[:end]
        if message.WhichOneof("message") == "error":
            raise self._end(wire.typed_error(message.error.reason, message.error.metadata, message.error.message))
        return message

    def _last_words(self) -> None:
        """Raise what the agent said before it went, if it was an error."""
        poller = self._poller(select.POLLIN)
        while poller.poll(0):
            self._fill()
            while self._next() is not None:
                pass

    def _end(self, error: WeightplaneError) -> WeightplaneError:
        self._over = error
        return error


def _connect(path: Path, patience: Patience, alive: Callable[[], None] | None) -> socket.socket:
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(SLICE_SECONDS)
        try:
            connection.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError, TimeoutError) as error:
            connection.close()
            if patience.left <= 0:
                raise patience.expired("join", f"{PEER} at {path}") from error
            if alive is not None:
                alive()
            patience.sleep(CONNECT_RETRY_SECONDS)
        else:
            connection.setblocking(False)
            return connection
