"""A training actor as slime's and vime's are: a rank that updates rollout engines in the order of their `actor.py`.

    RANK=0 WORLD_SIZE=2 python -m tests.support.slime_rank WORK_DIR UPDATES

The rollout manager is the test: WORK_DIR/engines-N.json says what `get_updatable_engines_and_lock` would answer before
update N. Prints a JSON line after each, and for each error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from controlplane.core.errors import WeightplaneError
from tests.support.toy_rank import Script, ToySource, say
from trainer_agent.adapters.updater import WeightplaneUpdater
from trainer_agent.rank import TrainerRank

WAIT_SECONDS = 60.0


class Actor:
    """slime/backends/megatron_utils/actor.py, as far as weights go."""

    def __init__(self, rank: TrainerRank, source: ToySource, work: Path) -> None:
        self._source = source
        self._work = work
        self.weight_updater = WeightplaneUpdater(rank)

    def train(self, rollout_id: int) -> None:
        self._source.step = rollout_id + 1

    def update_weights(self, rollout_id: int) -> None:
        """Steps 3, 5 and 6 of theirs; sleeping and process groups are their own business."""
        engines, lock, num_new_engines, gpu_counts, gpu_offsets = self._updatable_engines_and_lock(rollout_id)
        if num_new_engines > 0:
            self.weight_updater.connect_rollout_engines(
                engines, lock, engine_gpu_counts=gpu_counts, engine_gpu_offsets=gpu_offsets
            )
            dist.barrier()
        self.weight_updater.update_weights()

    def _updatable_engines_and_lock(self, rollout_id: int) -> tuple[list[Any], None, int, list[int], list[int]]:
        file, give_up = self._work / f"engines-{rollout_id}.json", time.monotonic() + WAIT_SECONDS
        while not file.exists():
            if time.monotonic() > give_up:
                raise TimeoutError(f"{file} did not appear")
            time.sleep(0.02)
        engines, new = json.loads(file.read_text())
        return engines, None, new, [1] * len(engines), list(range(len(engines)))


def main() -> None:
    work, updates = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    rank_number, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rendezvous = f"file://{work / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank_number, world_size=world)
    source = ToySource(Script(), rank_number)
    with TrainerRank.join(source=source, push_timeout=WAIT_SECONDS) as rank:
        actor = Actor(rank, source, work)
        for rollout_id in range(updates):
            actor.train(rollout_id)
            try:
                actor.update_weights(rollout_id)
                error = ""
            except WeightplaneError as refusal:
                error = str(refusal)
            updater = actor.weight_updater
            say(event="updated", rollout_id=rollout_id, weight_version=updater.weight_version, error=error)


if __name__ == "__main__":
    main()
