"""The commands for people, each as a process, asked of a local fleet's coordinator."""

from __future__ import annotations

import asyncio
import os
import sys

from tests.support.local_fleet import LocalFleet


async def weightplane(fleet: LocalFleet, *words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "controlplane.cli.main", *words, "--coordinator", fleet.address),
        stdout=pipe,
        stderr=pipe,
        env=os.environ | {"NO_COLOR": "1", "TERM": "dumb"},
    )
    out, err = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode or 0, out.decode(), err.decode()
