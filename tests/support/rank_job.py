"""A module as torch.distributed ranks of its own, run to its end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence


def run_ranks(
    module: Sequence[str], world: int, environment: Mapping[str, str] | None = None, *, within: float = 240.0
) -> None:
    """`python -m` the module and its arguments, a process a rank: each must end with 0 within so many seconds.
    Raises AssertionError with what they wrote where one does not."""
    command = [sys.executable, "-m", *module]
    common = os.environ | {"OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world), **(environment or {})}
    ranks = [
        subprocess.Popen(command, env=common | {"RANK": str(r)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for r in range(world)
    ]
    try:
        outputs = [rank.communicate(timeout=within)[0].decode() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(outputs)
