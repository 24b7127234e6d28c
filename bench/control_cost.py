"""What the control plane itself costs: updates of 4 KB to in-memory engines, over real gRPC, in one process.

    python bench/control_cost.py [--engines N] [--pushes N]

The payload is tiny and an install takes nothing, so what remains is begin, plan, streams, ready, go (a durable write),
commit, applied, decide (another one). One process does everyone's work: on a real fleet the parts run at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import tempfile
import time
from pathlib import Path

import structlog

from tests.support.local_fleet import LAYOUT, LocalFleet, Weights, local_fleet

WARM_UP_PUSHES = 5


async def measure(engines: int, pushes: int) -> dict[str, float]:
    """Milliseconds of one update, from begin to the decision."""
    with tempfile.TemporaryDirectory() as directory:
        async with local_fleet(Path(directory), engines=engines) as fleet:
            for _ in range(WARM_UP_PUSHES):
                await _push(fleet)
            taken = sorted([await _push(fleet) for _ in range(pushes)])
    return {
        "engines": engines,
        "pushes": pushes,
        "payload_bytes": LAYOUT.byte_count,
        "update_ms_median": round(statistics.median(taken), 2),
        "update_ms_p95": round(taken[int(len(taken) * 0.95)], 2),
        "update_ms_worst": round(taken[-1], 2),
    }


async def _push(fleet: LocalFleet) -> float:
    weights = Weights()
    started = time.perf_counter()
    await fleet.push(weights)
    return (time.perf_counter() - started) * 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--pushes", type=int, default=200)
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    print(json.dumps(asyncio.run(measure(given.engines, given.pushes))))


if __name__ == "__main__":
    main()
