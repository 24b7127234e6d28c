"""A rank that pushes a checkpoint's tensors, moved a little at each step: real engines without a real trainer.

    python -m tests.support.checkpoint_rank MODEL_DIR WORK_DIR PUSHES

After push n, WORK_DIR/pushed-n has the version's number; push n + 1 begins when WORK_DIR/next-n appears. A life that
comes after another goes on where WORK_DIR says that the pushes stand.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.support.megatron_pushes import await_file
from trainer_agent.rank import TrainerRank
from trainer_agent.source import ParamMeta


class MovedCheckpoint:
    """Every tensor plus `step` hundredths, the embedding too."""

    def __init__(self, model_dir: Path) -> None:
        self._tensors = load_file(model_dir / "model.safetensors")
        self.step = 0

    def metadata(self) -> Sequence[ParamMeta]:
        return [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self._tensors.items()]

    def ties(self) -> Sequence[tuple[str, str]]:
        return [("lm_head.weight", "model.embed_tokens.weight")]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self._tensors.items():
            yield name, tensor + 0.01 * self.step


def main() -> None:
    model_dir, work, pushes = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    source = MovedCheckpoint(model_dir)
    with TrainerRank.join(source=source) as rank:
        done = len(list(work.glob("pushed-*")))
        for number in range(done + 1, pushes + 1):
            source.step = number
            report = rank.push(number)
            if os.environ["RANK"] == "0":
                (work / f"pushed-{number}").write_text(str(report.version.number))
            await_file(work / f"next-{number}")


if __name__ == "__main__":
    main()
