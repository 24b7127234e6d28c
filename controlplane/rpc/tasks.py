"""Work that must end once it began, whoever waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end also if the caller is cancelled meanwhile; the cancellation is raised afterwards.

    Unlike `asyncio.shield` it never returns while the work still runs.
    """
    task, caller = asyncio.create_task(work), asyncio.current_task()
    assert caller is not None
    asked_before = caller.cancelling()
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if caller.cancelling() > asked_before:  # else the work's own
                cancelled = error
    if cancelled is not None:
        task.exception()  # seen here: the caller will not ask
        raise cancelled
    return task.result()
