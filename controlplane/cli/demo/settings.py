"""What a demo is asked to do. Pure values."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class DemoModel(StrEnum):
    """Which model is trained."""

    SMOLLM2 = "smollm2"
    TINY = "tiny"

    @property
    def default_steps(self) -> int:
        return {DemoModel.SMOLLM2: 8, DemoModel.TINY: 10}[self]


@dataclass(frozen=True, slots=True)
class DemoSettings:
    """Fields are the options of `weightplane demo`."""

    model: DemoModel
    steps: int
    verify: bool
    as_json: bool
    keep: Path | None
    seed: int
    listen: str
    cache_dir: Path
    limit_seconds: float


def default_cache_dir() -> Path:
    """$XDG_CACHE_HOME/weightplane, or ~/.cache/weightplane."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weightplane"
