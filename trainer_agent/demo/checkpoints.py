"""Checkpoints of the demo's training, by Megatron's `dist_checkpointing`: any later layout can load them.

A checkpoint appears whole or not at all, with the version under which its weights were last pushed. That version
is a record, never adopted: a trainer that comes back pushes again and is given a new number (INV-5). Saving spawns
processes, so the script that trains needs a `__main__` guard.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from megatron.core import dist_checkpointing

from controlplane.core.versions import Term, WeightVersion
from trainer_agent.demo.learner import Learner

KEPT = 2
"""Checkpoints on disk: the latest, and the one before it."""
_PREFIX = "step-"
_UNFINISHED = ".unfinished"


@dataclass(frozen=True, slots=True)
class Restored:
    step: int
    version: WeightVersion


class Checkpoints:
    """Of one training run, in one directory that all ranks see. Both methods are collectives."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def save(self, learner: Learner, step: int, version: WeightVersion) -> Path:
        """Write the state after `step` and drop the older ones."""
        target = self._directory / f"{_PREFIX}{step:06d}"
        unfinished = target.with_name(_UNFINISHED)
        if dist.get_rank() == 0:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        dist.barrier()
        state = learner.sharded_state(loading=False) | {"step": step, "version": [version.number, version.term]}
        dist_checkpointing.save(state, str(unfinished))
        if dist.get_rank() == 0:
            shutil.rmtree(target, ignore_errors=True)
            unfinished.rename(target)
            for old in self._finished()[:-KEPT]:
                shutil.rmtree(old)
        dist.barrier()
        return target

    def restore(self, learner: Learner) -> Restored | None:
        """Load the latest; None when there is none."""
        finished = self._finished()
        if not finished:
            return None
        wanted = learner.sharded_state(loading=True) | {"step": 0, "version": [0, 0]}
        state = dist_checkpointing.load(wanted, str(finished[-1]))
        learner.restore(state)
        number, term = state["version"]
        return Restored(state["step"], WeightVersion(number=number, term=Term(term)))

    def _finished(self) -> list[Path]:
        return sorted(self._directory.glob(f"{_PREFIX}*"))
