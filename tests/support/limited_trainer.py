"""A trainer in a process of its own whose files can be limited in size, or that can be killed."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.support.local_fleet import LocalFleet
from tests.support.toy_rank import Script

TOY = Path(__file__).parents[1] / "support" / "toy_rank.py"
ROOT = Path(__file__).parents[2]


class LimitedTrainer:
    """`run_trainer` in a process whose files can be limited in size, as a full disk limits them."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[dict[str, Any]] = []
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def start(cls, fleet: LocalFleet, script: Script, root: Path) -> LimitedTrainer:
        code = (
            "import asyncio, sys; from pathlib import Path;"
            "from controlplane.rpc.logs import configure_logging;"
            "from trainer_agent.agent import TrainerSettings, run_trainer;"
            "configure_logging('trainer', json=True);"
            f"settings = TrainerSettings(coordinator={fleet.address!r}, nproc_per_node=2, max_restarts=0,"
            f" chunk_bytes=65536, checkpoint_root=Path({str(root)!r}), checkpoint_keep=2);"
            f"sys.exit(asyncio.run(run_trainer(settings, [{str(TOY)!r}, {json.dumps(asdict(script))!r}])))"
        )
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}"}
        pipe = asyncio.subprocess.PIPE
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable, "-c", code, stdout=pipe, stderr=asyncio.subprocess.STDOUT, env=environment, cwd=ROOT
            )
        )

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while line := await self.process.stdout.readline():
            try:
                self.lines.append(json.loads(line))
            except ValueError:
                continue

    def said(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line.get("event") == event]

    def limit(self, byte_count: int) -> None:
        """No file of the agent grows beyond it from now on; its ranks are other processes."""
        _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (byte_count, hard))

    async def code(self) -> int:
        code = await asyncio.wait_for(self.process.wait(), 100)
        await self._reader
        return code
