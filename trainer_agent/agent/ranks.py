"""The agent's end of the local socket: who is connected, and the news that a rank is gone.

Promises: only processes of the same user talk here (private directory, mode 0700, and the kernel's word for the
peer); the death of a rank is noticed by its process id too, so that a forked child that inherited
the socket cannot hide it. Nothing that a rank does blocks the agent's loop.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import structlog
from google.protobuf.message import DecodeError

from controlplane.core.errors import FrameInvalid, LimitExceeded, WeightplaneError
from controlplane.processes import open_process
from controlplane.rpc.validation import validate
from trainer_agent import wire
from weightplane.local.v1 import rank_pb2

log = structlog.get_logger(__name__)

MAX_UNREAD_BYTES = 1024 * 1024
"""What may wait for a rank that reads nothing: a stopped rank gets a plan and a result, never more."""
LAST_WORDS_SECONDS = 0.2
"""What a dead process still sent is read for so long, and an end is so long not yet called a death."""
_CREDENTIALS = struct.Struct("iii")


class RankEvents(Protocol):
    """What the agent is told. Called in the loop; must not block."""

    def rank_said(self, rank: RankConnection, request: rank_pb2.RankRequest) -> None: ...

    def rank_gone(self, rank: RankConnection, cause: str) -> None:
        """Once for each connection, whatever ended it."""
        ...


class RankConnection:
    """One connected process. `join` is what it said first."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, events: RankEvents) -> None:
        self._reader = reader
        self._writer = writer
        self._events = events
        self._death: int | None = None
        self._died = asyncio.Event()
        self._cause = ""
        self.pid, self.uid = _peer(writer)
        self.join = rank_pb2.Join()
        self.left = False
        """Said that it leaves."""

    @property
    def rank(self) -> int:
        return self.join.rank

    def send(self, response: rank_pb2.RankResponse) -> None:
        """Queue a message; never waits."""
        if self._writer.is_closing():
            return
        if self._writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.drop("it reads nothing")
            return
        self._writer.write(wire.encode(response))

    def refuse(self, error: WeightplaneError, *, fenced: bool = False) -> None:
        """End the session with an error; what was sent before it is still delivered."""
        message = rank_pb2.SessionError(
            reason=error.reason, message=str(error), fenced=fenced, metadata=error.metadata()
        )
        self.send(rank_pb2.RankResponse(error=message))

    def drop(self, cause: str) -> None:
        """Close the connection. The events get `cause`."""
        self._cause = self._cause or cause
        self._writer.close()
        self._reader.feed_eof()

    async def serve(self) -> None:
        """Read until the end; validated messages go to the events."""
        self._watch_process()
        try:
            while (request := await self._read()) is not None:
                self._events.rank_said(self, request)
            self._cause = self._cause or await self._end_of_stream()
        except (FrameInvalid, LimitExceeded, DecodeError) as error:
            self._cause = f"it sent what is no message: {error}"
        except OSError as error:
            self._cause = self._cause or str(error)
        finally:
            self._forget_process()
            self._writer.close()
            self._events.rank_gone(self, self._cause or "the agent ends")

    async def _read(self) -> rank_pb2.RankRequest | None:
        try:
            header = await self._reader.readexactly(wire.HEADER_BYTES)
            body = await self._reader.readexactly(wire.body_length(header))
        except asyncio.IncompleteReadError:
            return None
        request = rank_pb2.RankRequest.FromString(body)
        validate(request)
        if request.HasField("join"):
            self.join = request.join
        self.left = self.left or request.HasField("leave")
        return request

    async def _end_of_stream(self) -> str:
        """Why it ended. The kernel closes a dying process's sockets a moment before it says that it is dead."""
        if self.left:
            return "it left"
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORDS_SECONDS):
                await self._died.wait()
        return f"process {self.pid} ended" if self._died.is_set() else "it closed the connection"

    def _watch_process(self) -> None:
        self._death = open_process(self.pid)
        if self._death is not None:
            asyncio.get_running_loop().add_reader(self._death, self._process_ended)

    def _process_ended(self) -> None:
        """Its last messages may still lie in the socket: the end comes after them, or a moment later at most."""
        self._forget_process()
        self._died.set()
        self._cause = self._cause or f"process {self.pid} ended"
        asyncio.get_running_loop().call_later(LAST_WORDS_SECONDS, self.drop, self._cause)

    def _forget_process(self) -> None:
        if self._death is not None:
            asyncio.get_running_loop().remove_reader(self._death)
            os.close(self._death)
            self._death = None


class RankServer:
    """Listens on a socket in a private directory."""

    def __init__(self, path: Path, events: RankEvents) -> None:
        self.path = path
        self._events = events
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: set[RankConnection] = set()

    async def start(self) -> None:
        """Listen. The directory must exist, and be closed to other users.

        Raises:
            PermissionError: it is not.
        """
        status = self.path.parent.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"{self.path.parent} must belong to this user and have mode 0700")
        self._server = await asyncio.start_unix_server(self._accept, self.path, limit=wire.MAX_FRAME_BYTES)

    async def close(self) -> None:
        """Stop listening, drop everybody, remove the socket."""
        if self._server is not None:
            self._server.close()
        for connection in list(self._connections):
            connection.drop("the agent ends")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_WORDS_SECONDS)
        self.path.unlink(missing_ok=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = RankConnection(reader, writer, self._events)
        if connection.uid != os.geteuid():
            log.warning("local_peer_refused", uid=connection.uid, pid=connection.pid)
            writer.close()
            return
        self._connections.add(connection)
        task = asyncio.create_task(connection.serve())
        self._tasks.add(task)
        task.add_done_callback(self._ended(connection))

    def _ended(self, connection: RankConnection) -> Callable[[asyncio.Task[None]], None]:
        def forget(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            self._connections.discard(connection)
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("rank_connection_failed", rank=connection.rank, exc_info=error)

        return forget


def _peer(writer: asyncio.StreamWriter) -> tuple[int, int]:
    """The kernel's word for the peer: (pid, uid)."""
    connection = writer.get_extra_info("socket")
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _gid = _CREDENTIALS.unpack(packed)
    return pid, uid
