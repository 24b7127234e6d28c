"""A fleet file's trainers: what each table may say, and the settings that its agent gets from it.

One table is one trainer agent with the ranks of one node. Ranks that another launcher starts (torchrun, Slurm) bring
their own agent and are in no fleet file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TrainerTable:
    """One trainer agent and what its ranks run."""

    name: str
    """Its id: `trainer_id`, unique among the file's engines and trainers."""
    script: Path
    """The training script; a relative path starts from the file's directory."""
    arguments: tuple[str, ...] = ()
    """Its arguments."""
    ranks: int = 1
    """How many ranks: `nproc_per_node`."""
    model: str = "policy"
    """The set of weights that they train."""
    beside: tuple[str, ...] = ()
    """Ids of the engines on whose devices the ranks compute: one node has them all. Empty: on devices of their own."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its agent, over those of the file's `[trainer]`."""

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"{self.name}: ranks is at least 1, not {self.ranks}")
        if len(set(self.beside)) < len(self.beside):
            raise ValueError(f"{self.name}: beside names an engine twice")
