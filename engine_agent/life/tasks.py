"""What runs for one life of an engine, and the life's end.

A task that ends by an error that nobody planned for ends the life: better none than a wrong one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

log = structlog.get_logger(__name__)


class LifeTasks:
    """Of one life."""

    def __init__(self) -> None:
        self.died: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the life cannot go on."""
        self._tasks: set[asyncio.Task[None]] = set()

    def die(self, cause: str) -> None:
        """This life cannot go on; whoever runs it ends it. The first cause stands."""
        if not self.died.done():
            self.died.set_result(cause)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def cancel(self) -> None:
        """All of them."""
        for task in self._tasks:
            task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("engine_task_failed", exc_info=task.exception())
            self.die(f"a task of the agent failed: {task.exception()!r}")
