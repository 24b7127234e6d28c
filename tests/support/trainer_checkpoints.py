"""What a trainer's pushes left on disk, and what the coordinator knows of it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from controlplane.checkpoints import CheckpointManifest, open_files
from tests.support.eventually import eventually
from tests.support.local_fleet import LocalFleet
from tests.support.obedient import ObedientRanks
from tests.support.toy_rank import tensors_of
from weightplane.v1 import fleet_pb2


async def checkpoints(fleet: LocalFleet) -> list[fleet_pb2.Checkpoint]:
    """What the coordinator can bring by itself, newest first."""
    return list((await fleet.view()).checkpoints)


def names(root: Path) -> list[str]:
    return sorted(p.name for p in root.iterdir())


def contents(root: Path, name: str, manifest: CheckpointManifest) -> dict[str, bytes]:
    """sha256 of each tensor's bytes as they lie in the files."""
    found = {}
    for file in open_files(root, name, manifest):
        for index, stored in file.tensors:
            data = os.pread(file.descriptor, stored.byte_count, stored.offset)
            found[manifest.layout.tensors[index].name] = hashlib.sha256(data).digest()
        file.close()
    return found


def pushed_contents(step: int) -> dict[str, bytes]:
    return {name: hashlib.sha256(t.numpy().tobytes()).digest() for name, t in tensors_of(step).items()}


async def pushed_and_kept(fleet: LocalFleet, ranks: ObedientRanks, step: int) -> int:
    """The number under which `step` was pushed, once its checkpoint is known to the coordinator."""
    number = (await ranks.all("push", step=step))[0]["version"]

    async def known() -> bool:
        return number in [c.version.number for c in await checkpoints(fleet)]

    await eventually(known)
    return int(number)
