"""How much memory the demo's processes take together: summed PSS, so that shared pages count once."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from controlplane.processes import descendants

SAMPLE_SECONDS = 1.0
MIB = 1 << 20


class PeakMemory:
    """The highest sum seen so far, over this process and everything below it."""

    def __init__(self) -> None:
        self.peak_bytes = 0

    @property
    def peak_mib(self) -> int:
        return self.peak_bytes // MIB

    async def sample_forever(self) -> None:
        """In a thread: reading a large process's maps takes some milliseconds."""
        while True:
            self.peak_bytes = max(self.peak_bytes, await asyncio.to_thread(tree_pss_bytes, os.getpid()))
            await asyncio.sleep(SAMPLE_SECONDS)


def tree_pss_bytes(root: int) -> int:
    """Summed proportional set size of `root` and its descendants. Processes that end meanwhile count as nothing."""
    return sum(_pss_bytes(pid) for pid in [root, *descendants(root)])


def _pss_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
