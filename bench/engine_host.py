"""Many engine agents with in-memory engines in one process: each with its own port, session, connection and disk.

    python -m bench.engine_host COORDINATOR DIRECTORY FIRST COUNT [frozen]

`frozen`: engines of a model that nobody trains, which serve what they loaded from their start.

The agents are the product's; only that they share a process and its event loop is this file's. It ends at a signal.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path

import structlog

from engine_agent.daemon.agent import run_engine
from engine_agent.daemon.settings import EngineSettings
from engine_agent.memory.engine import MemorySettings

RUN = "bench"
FROZEN = "frozen"
"""Name of the model that nobody trains."""
SHAPES = {"a": (1000,), "b": (3, 5)}
"""float32: 4,060 bytes."""
AT_ONCE = 16
"""Agents that start together: their hellos are not the measured work."""


async def main(coordinator: str, directory: Path, first: int, count: int, frozen: bool) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    stop = asyncio.Event()
    agents = []
    for i in range(first, first + count):
        settings = EngineSettings(
            engine_id=f"engine-{i}",
            coordinator=coordinator,
            run_id=RUN,
            model=FROZEN if frozen else "policy",
            initial="serve" if frozen else "unset",
            state_dir=directory,
            backend="memory",
            memory=MemorySettings(tensors=SHAPES),
        )
        agents.append(asyncio.create_task(run_engine(settings, stop)))
        if i % AT_ONCE == AT_ONCE - 1:
            await asyncio.sleep(0.05)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    await stop.wait()
    await asyncio.gather(*agents)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), "frozen" in sys.argv[5:]))
