"""Waiting in tests: for a condition, within a limit, never for a fixed time.

A check holds when it returns without raising AssertionError and its value is not False or None.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")
EVERY_SECONDS = 0.02
PATIENCE_SECONDS = 60.0
"""Longest that a test waits for what does come: on a machine that does ten other things, seconds say nothing."""


@overload
async def eventually(check: Callable[[], Awaitable[T]], *, within: float = PATIENCE_SECONDS) -> T: ...
@overload
async def eventually(check: Callable[[], T], *, within: float = PATIENCE_SECONDS) -> T: ...
async def eventually(check: Callable[[], Any], *, within: float = PATIENCE_SECONDS) -> Any:
    """The first value for which `check` holds. Raises AssertionError with the check's last words after `within` s."""
    deadline = time.monotonic() + within
    while True:
        try:
            answer = check()
            value = await answer if inspect.isawaitable(answer) else answer
            if value is not False and value is not None:
                return value
            problem = f"the check gave {value!r}"
        except AssertionError as error:
            problem = str(error) or "the check failed"
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {within} s: {problem}")
        await asyncio.sleep(EVERY_SECONDS)


def eventually_blocking(check: Callable[[], T], *, within: float = PATIENCE_SECONDS) -> T:
    """`eventually` for tests without an event loop."""
    return asyncio.run(eventually(check, within=within))
