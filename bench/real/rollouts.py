"""Rollouts without end, in a process of their own: so many at once, as an RL loop keeps an engine busy.

    python -m bench.real.rollouts ADDRESS CONCURRENT

Each line on standard input asks for the number of tokens so far, which is the answer. It ends when standard input does.
"""

from __future__ import annotations

import asyncio
import itertools
import sys

from bench.real.asked import Asked
from bench.real.fleet import RUN
from controlplane.core.sampling import SamplingSettings
from controlplane.rollout.client import RolloutClient

PROMPT_TOKENS = 24
NEW_TOKENS = 200
FIRST_TOKEN = 1000
"""Prompts are token ids from here on: any will do, and no two are the same."""


class Rollouts(Asked):
    """The process."""

    def __init__(self, address: str, concurrent: int) -> None:
        super().__init__("bench.real.rollouts", address, str(concurrent))

    def tokens(self) -> int:
        """Made so far."""
        return int(self.ask("tokens"))


class _Count:
    tokens = 0


async def _roll(client: RolloutClient, count: _Count, prompts: itertools.count[int]) -> None:
    sampling = SamplingSettings(max_tokens=NEW_TOKENS, temperature=1.0, ignore_eos=True, logprobs=0)
    while True:
        first = FIRST_TOKEN + 7 * next(prompts) % 20_000
        async for delta in client.stream(list(range(first, first + PROMPT_TOKENS)), sampling):
            count.tokens += len(delta.tokens)


async def main(address: str, concurrent: int) -> None:
    count, prompts = _Count(), itertools.count()
    async with RolloutClient(address, run_id=RUN) as client, asyncio.TaskGroup() as group:
        tasks = [group.create_task(_roll(client, count, prompts)) for _ in range(concurrent)]
        while await asyncio.to_thread(sys.stdin.readline):
            print(count.tokens, flush=True)
        for task in tasks:
            task.cancel()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
