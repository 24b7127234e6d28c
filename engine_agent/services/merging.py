"""Several requests of one call as one stream: whichever has something is heard, and none outlives the call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from engine_agent.life.requests import Part, Parts


async def merged(runs: Sequence[Parts]) -> AsyncGenerator[tuple[int, Part], None]:
    """Each part with the place of its request, in the order in which they come. Closing this aborts all of them.

    What one of them raises ends all.
    """
    try:
        if len(runs) == 1:
            async for part in runs[0]:
                yield 0, part
            return
        waiting = {asyncio.ensure_future(anext(run)): index for index, run in enumerate(runs)}
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in sorted(done, key=waiting.__getitem__):
                    index = waiting.pop(task)
                    part = task.result()
                    if part.delta.finish_reason is None:
                        waiting[asyncio.ensure_future(anext(runs[index]))] = index
                    yield index, part
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
    finally:
        for run in runs:
            await run.aclose()
