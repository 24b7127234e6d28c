"""What a demo training run is asked to do. Pure values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class GrpoSettings:
    """Fields are the options of `python -m trainer_agent.demo.grpo`."""

    model_dir: Path
    """A Hugging Face model directory. With a tokenizer in it the task is text, without one token ids."""
    checkpoint_dir: Path
    """Where checkpoints are kept; training goes on from the latest."""
    events: Path
    """Rank 0 appends one JSON object a line."""
    export_dir: Path | None
    """Where the trained weights are written at the end, as a new Hugging Face model directory."""
    tensor_parallel: int
    pipeline_parallel: int
    steps: int
    seed: int
    learning_rate: float | None
    """None: what the task was measured with."""
    prompts_per_step: int
    group_size: int
    """Samples of each prompt."""
    micro_batch: int
    checkpoint_every: int
    """Steps between checkpoints. One more is written at the end."""
