"""Real Megatron ranks that push moved weights, in one topology after the other; engines are then compared by tokens.

    RANK=0 WORLD_SIZE=4 python -m tests.support.megatron_moves MODEL_DIR WORK_DIR PUSHES TOPOLOGIES

TOPOLOGIES is JSON, as `Topology.to_json` makes it. Every weight is moved by a function of itself, so that a checkpoint
moved alike is the truth (`moved`), and neither training nor export takes part in it. After push n of topology t there
is WORK_DIR/pushed-t-n with the version's number; the next begins when WORK_DIR/next-t-n appears.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.megatron_pushes import await_file
from tests.sweep.job import _build
from tests.sweep.topology import Topology
from trainer_agent.megatron.source import MegatronSource
from trainer_agent.rank import TrainerRank

PUSH_SECONDS = 120.0


def move(weight: torch.Tensor, push: int) -> torch.Tensor:
    """What push `push` makes of each element, wherever it lies."""
    return weight + 0.02 * torch.sin(weight * 40 * push + push)


def moved(weights: Mapping[str, torch.Tensor], pushes: int) -> dict[str, torch.Tensor]:
    """What the engines hold after so many pushes of a fresh model."""
    result = dict(weights)
    for push in range(1, pushes + 1):
        result = {name: move(weight, push) for name, weight in result.items()}
    return result


def main() -> None:
    model_dir, work, pushes = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{work / 'rendezvous'}", rank=rank, world_size=world)
    for number, fields in enumerate(json.loads(sys.argv[4])):
        _push_all(Topology(**fields), number, model_dir, work, pushes)


@torch.no_grad()
def _push_all(topology: Topology, number: int, model_dir: Path, work: Path, pushes: int) -> None:
    chunks = _build(topology, model_dir)
    source = MegatronSource(chunks, model_dir)
    with TrainerRank.join(source=source, push_timeout=PUSH_SECONDS) as rank:
        for push in range(1, pushes + 1):
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.copy_(move(parameter, push))
            report = rank.push(push)
            if dist.get_rank() == 0:
                file = work / f"pushed-{number}-{push}"
                file.with_suffix(".part").write_text(str(report.version.number))
                file.with_suffix(".part").rename(file)
            await_file(work / f"next-{number}-{push}")


if __name__ == "__main__":
    main()
