"""The calls that the coordinator passes on to engines: how many there may be, and what their callers call them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Iterator
from contextlib import contextmanager
from typing import TypeVar

from controlplane.core.errors import LimitExceeded, RequestAborted

T = TypeVar("T")


class ProxiedCall:
    """One call, until its caller has the answer or went away."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.begun = False
        """Something of its answer was handed on: no other engine may be asked, and only its engine may end it."""
        self._aborted: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def unless_aborted(self, work: Awaitable[T]) -> T:
        """The work's result. Raises RequestAborted as soon as a caller ended the call by its name."""
        task = asyncio.ensure_future(work)
        try:
            either: set[asyncio.Future[T] | asyncio.Future[None]] = {task, self._aborted}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if self._aborted.done():
                raise RequestAborted(request_id=self.name)
            return task.result()
        finally:
            task.cancel()

    def abort(self) -> None:
        if not self._aborted.done():
            self._aborted.set_result(None)


class ProxiedCalls:
    """Those that are here. One more than the limit is refused before anything of it is done."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._here: set[ProxiedCall] = set()

    def __len__(self) -> int:
        return len(self._here)

    @contextmanager
    def enter(self, name: str) -> Iterator[ProxiedCall]:
        """A call is here while the block runs. Raises LimitExceeded."""
        if len(self._here) >= self._limit:
            what = "rollout calls through the coordinator at once; engines themselves take more"
            raise LimitExceeded(what=what, limit=self._limit, got=len(self._here) + 1)
        call = ProxiedCall(name)
        self._here.add(call)
        try:
            yield call
        finally:
            self._here.discard(call)

    def abort_waiting(self, names: Collection[str]) -> list[str]:
        """End those of these names that wait for an engine or for its first word; the names of those that did."""
        ended = [call for call in self._here if call.name in names and not call.begun]
        for call in ended:
            call.abort()
        return [call.name for call in ended]
