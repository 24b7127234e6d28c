"""Observes one engine in this process: `python -m tests.support.host_observer ENGINE ADDRESS COORDINATOR_LOG`.

Until its standard input ends; then it prints as JSON what was wrong, how many samples it had, and the versions that it
was told of. It is run on the engine's own host, so that it sees the engine also while nobody else does.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from controlplane.rpc.channels import open_channel
from tests.kill_matrix.observer import Ledger, Observer
from tests.kill_matrix.truth import MemoryTruth


async def main() -> None:
    engine_id, address, log = sys.argv[1:]
    async with open_channel(address) as channel:
        observer = Observer(engine_id, channel, Ledger(Path(log)), MemoryTruth())
        watching = asyncio.create_task(observer.watch())
        await asyncio.to_thread(sys.stdin.read)
        watching.cancel()
        (broke,) = await asyncio.gather(watching, return_exceptions=True)
    wrong = list(dict.fromkeys(observer.wrong))
    wrong += [] if isinstance(broke, asyncio.CancelledError) else [f"the observer broke: {broke!r}"]
    print(json.dumps({"wrong": wrong, "samples": observer.samples, "claimed": sorted(observer.claimed)}))


if __name__ == "__main__":
    asyncio.run(main())
