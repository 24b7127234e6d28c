"""A value that many tasks watch: each gets the newest, and none ever queues behind a slow one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Latest(Generic[T]):
    """Level-triggered: watchers see the value now, then each later state, skipping those that passed meanwhile."""

    def __init__(self, value: T) -> None:
        self._value = value
        self._changed, self._ended = asyncio.Event(), False
        self._watchers, self._watched = 0, asyncio.Event()

    @property
    def value(self) -> T:
        return self._value

    def set(self, value: T) -> None:
        """Replace the value and wake every watcher."""
        self._value = value
        self._changed.set()
        if not self._ended:
            self._changed = asyncio.Event()

    def end(self) -> None:
        """Whoever watches has seen the last value, or sees it, and watches no more."""
        self._ended = True
        self._changed.set()

    async def watch(self) -> AsyncIterator[T]:
        """The value now, and after each change, until `end`."""
        self._watchers += 1
        self._watched.set()
        try:
            while True:
                changed = self._changed
                yield self._value
                await changed.wait()
                if self._ended and changed is self._changed:
                    return
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._watched.clear()

    async def watched(self) -> None:
        """Wait until somebody follows it; return at once while somebody does."""
        await self._watched.wait()

    async def wait_for(self, predicate: Callable[[T], bool], timeout_seconds: float) -> T:
        """The first value that satisfies `predicate`, the present one included. Raises TimeoutError."""
        async with asyncio.timeout(timeout_seconds):
            while True:
                changed = self._changed
                if predicate(self._value):
                    return self._value
                await changed.wait()
