"""`run_trainer` as a process of its own, with two toy ranks."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from controlplane.failpoints import DIRECTORY_VARIABLE
from controlplane.processes import descendants
from tests.support.local_fleet import LocalFleet
from tests.support.toy_rank import Script

TOY = Path(__file__).parents[1] / "support" / "toy_rank.py"
ROOT = Path(__file__).parents[2]


class Trainer:
    """`run_trainer` in a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(
        cls, fleet: LocalFleet, script: Script, *, max_restarts: int = 1, failpoints: Path | None = None
    ) -> Trainer:
        code = (
            "import asyncio, sys; from pathlib import Path;"
            "from trainer_agent.agent import TrainerSettings, run_trainer;"
            f"settings = TrainerSettings(coordinator={fleet.address!r}, nproc_per_node=2,"
            f" max_restarts={max_restarts}, stop_seconds=15.0, state_dir=Path({str(fleet.directory / 'trainer')!r}));"
            f"sys.exit(asyncio.run(run_trainer(settings, [{str(TOY)!r}, {json.dumps(asdict(script))!r}])))"
        )
        return cls(await start_python(["-c", code], {DIRECTORY_VARIABLE: str(failpoints)} if failpoints else {}))

    async def finish(self, within: float = 200.0) -> tuple[int, list[dict[str, Any]]]:
        """Exit code, and what its ranks said."""
        out, _ = await asyncio.wait_for(self.process.communicate(), within)
        lines = []
        for line in out.decode().splitlines():
            with suppress(json.JSONDecodeError):
                lines.append(json.loads(line))
        return self.process.returncode or 0, lines

    def below(self) -> list[int]:
        return descendants(self.process.pid)


async def start_python(arguments: list[str], environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    whole = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'protos'}", **environment}
    return await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=asyncio.subprocess.PIPE, env=whole, cwd=ROOT
    )


def events(lines: list[dict[str, Any]], event: str) -> list[dict[str, Any]]:
    return [line for line in lines if line["event"] == event]
