"""SmolLM2-135M in bfloat16, as two versions that differ in every matrix: 272 tensors, 269 MB.

Each measured push brings the other version, so that nothing can be left out for being the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from controlplane.cli.demo.settings import default_cache_dir
from trainer_agent.demo.models import smollm2
from trainer_agent.source import ParamMeta
from trainer_agent.sources.iterable import IterableSource

TIES = (("lm_head.weight", "model.embed_tokens.weight"),)
STEP = 2.0**-6
"""The second version is the first times 1 + STEP: another number in each place, and a model that speaks as well."""

Tensors = dict[str, torch.Tensor]


def model_directory() -> Path:
    """The model, converted once and kept, as the demo has it."""
    return smollm2(default_cache_dir().absolute())


def two_versions(model: Path) -> tuple[Tensors, Tensors]:
    """Contiguous bfloat16 tensors in this process's own memory, less the tied head."""
    aliases = {alias for alias, _ in TIES}
    with safe_open(model / "model.safetensors", framework="pt") as file:
        names = [name for name in file.keys() if name not in aliases]  # noqa: SIM118 - no mapping
        first = {name: file.get_tensor(name).to(torch.bfloat16) for name in names}
    return first, {name: tensor * (1 + STEP) for name, tensor in first.items()}


def byte_count(tensors: Tensors) -> int:
    return sum(t.numel() * t.itemsize for t in tensors.values())


class Turning:
    """A source whose weights `turn` exchanges for the other version's, as a training step does."""

    def __init__(self, versions: tuple[Tensors, Tensors]) -> None:
        self._versions = versions
        self._turns = 0

    def turn(self) -> Tensors:
        self._turns += 1
        return self.current

    @property
    def current(self) -> Tensors:
        return self._versions[self._turns % 2]

    def source(self) -> IterableSource:
        metadata = [ParamMeta(name, t.dtype, tuple(t.shape)) for name, t in self.current.items()]
        return IterableSource(metadata, self._items, ties=TIES)

    def _items(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self.current.items())
