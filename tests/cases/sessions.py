"""Sessions with the coordinator, frame by frame, a trainer that holds one, and notes of what was told."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc

from controlplane.core.errors import WeightplaneError
from controlplane.rpc.errors import from_rpc_error
from tests.cases.samples import WITHIN
from weightplane.v1 import engine_pb2, fleet_pb2

T = TypeVar("T")


class Notes(Generic[T]):
    """Every message of one watch, in order."""

    def __init__(self, call: Any, unpack: Callable[[Any], T]) -> None:
        self.told: list[T] = []
        self._call = call
        self._task = asyncio.create_task(self._read(unpack))

    async def _read(self, unpack: Callable[[Any], T]) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):  # whoever is watched may end
            async for response in self._call:
                self.told.append(unpack(response))

    async def close(self) -> None:
        self._call.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def number_of(status: engine_pb2.EngineStatus) -> int | None:
    """The applied number; None is unset."""
    return status.applied.number if status.HasField("applied") else None


class Session:
    """One agent's session with the coordinator, frame by frame."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def say(self, **frame: Any) -> None:
        await self._call.write(fleet_pb2.SessionRequest(**frame))

    async def hear(self) -> fleet_pb2.SessionResponse:
        """The next frame. Raises AioRpcError when the session was ended, also if it was in order."""
        frame = await asyncio.wait_for(self._call.read(), WITHIN)
        if frame is grpc.aio.EOF:
            code, details = await self._call.code(), await self._call.details()
            raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), await self._call.trailing_metadata(), details)
        assert isinstance(frame, fleet_pb2.SessionResponse)
        return frame

    async def welcome(self) -> fleet_pb2.Welcome:
        """Skips states: see `test_P5_a_newcomer_hears_its_welcome_before_anything_else`."""
        while not (frame := await self.hear()).HasField("welcome"):
            pass
        return frame.welcome

    async def end(self) -> WeightplaneError:
        """Hear on until the session is ended."""
        try:
            while True:
                await self.hear()
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error)

    def cut(self) -> None:
        """Nobody is there any more."""
        self._call.cancel()


@dataclass
class Trainer:
    """A session that holds a model's lease."""

    session: Session
    term: int
    hello: fleet_pb2.TrainerHello

    def die(self) -> None:
        """No goodbye."""
        self.session.cut()

    async def leave(self) -> None:
        await self.session.say(goodbye=fleet_pb2.Goodbye(reason="done"))
        await self.session.end()
