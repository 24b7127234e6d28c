"""A real Megatron trainer for tests: trains a step, pushes, exports what it pushed, and waits to be asked for more.

    python -m tests.support.megatron_pushes MODEL_DIR WORK_DIR TENSOR_PARALLEL PIPELINE_PARALLEL PUSHES

Started by a trainer agent's launcher. After push n there are WORK_DIR/weights-n (a checkpoint) and WORK_DIR/pushed-n;
the next begins when WORK_DIR/next-n appears.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from tests.support.megatron_job import _batch
from trainer_agent.demo.learner import Learner, LearnerSettings
from trainer_agent.megatron.export import export_hf
from trainer_agent.megatron.source import MegatronSource
from trainer_agent.rank import TrainerRank

WAIT_SECONDS = 180.0


def main() -> None:
    model_dir, work = Path(sys.argv[1]), Path(sys.argv[2])
    tensor_parallel, pipeline_parallel, pushes = map(int, sys.argv[3:])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    learner = Learner(
        model_dir,
        LearnerSettings(learning_rate=2e-2, micro_batch=2),  # large: each version must differ plainly from the last
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        dtype=torch.float32,
    )
    source = MegatronSource(learner.model, model_dir)
    with TrainerRank.join(source=source) as rank:
        for number in range(1, pushes + 1):
            with rank.phase("train"):
                learner.step(_batch(256))
            report = rank.push(number)
            export_hf(source, model_dir, work / f"weights-{number}", write=first)
            if first:
                (work / f"pushed-{number}").write_text(str(report.version.number))
            await_file(work / f"next-{number}")


def await_file(file: Path) -> None:
    give_up = time.monotonic() + WAIT_SECONDS
    while not file.exists():
        if time.monotonic() > give_up:
            raise TimeoutError(f"{file} did not appear")
        time.sleep(0.02)


if __name__ == "__main__":
    main()
