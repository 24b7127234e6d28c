"""The writers' streams at one life: their numbers, the bytes that each brings, and how each is told of its end.

What ends a stream's update is an event, and whoever has the stream hears of it: the service by the future that `begin`
gave, a streaming install by its `cut`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from controlplane.core.engine_events import Event, StreamEnded
from controlplane.core.errors import WeightplaneError
from engine_agent.receivers import Receiver


class Streams:
    """Of one life."""

    def __init__(self, apply: Callable[[Event], object]) -> None:
        self._apply = apply
        self._last = 0
        self._errors: dict[int, asyncio.Future[WeightplaneError]] = {}
        self._receivers: dict[int, Receiver] = {}
        self._cuts: dict[int, Callable[[WeightplaneError], None]] = {}

    def begin(self) -> tuple[int, asyncio.Future[WeightplaneError]]:
        """A stream's number, and the error with which another event may end it."""
        self._last += 1
        self._errors[self._last] = asyncio.get_running_loop().create_future()
        return self._last, self._errors[self._last]

    def over(self, stream: int, cause: str, reason: str) -> None:
        """The stream is over, however it ended (INV-3)."""
        self._errors.pop(stream, None)
        self._apply(StreamEnded(stream, cause, reason))

    def end(self, stream: int, error: WeightplaneError) -> None:
        """Another event ended its update."""
        future = self._errors.get(stream)
        if future is not None and not future.done():
            future.set_result(error)

    # ---- its bytes ----

    def keep(self, stream: int, receiver: Receiver) -> None:
        self._receivers[stream] = receiver

    def receiver(self, stream: int) -> Receiver:
        return self._receivers[stream]

    def give_away(self, stream: int) -> None:
        """Its receiver is somebody else's to close."""
        del self._receivers[stream]

    def drop(self, stream: int) -> None:
        receiver = self._receivers.pop(stream, None)
        if receiver is not None:
            receiver.close()

    def drop_all(self) -> None:
        for stream in list(self._receivers):
            self.drop(stream)

    # ---- a streaming install ----

    def streaming(self, stream: int, cut: Callable[[WeightplaneError], None]) -> None:
        """An install follows the stream, and is to be told if it ends before its commit frame (INV-4)."""
        self._cuts[stream] = cut

    def cut(self, stream: int, error: WeightplaneError) -> None:
        self._cuts[stream](error)

    def installed(self, stream: int) -> None:
        """Its install is over, however it ended."""
        self._cuts.pop(stream, None)
        self.drop(stream)
