"""Hugging Face tensors into a Megatron model, each rank its own shard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from megatron.core import parallel_state
from safetensors import safe_open
from torch import Tensor

from trainer_agent.megatron.errors import UnsupportedModel
from trainer_agent.megatron.families import family_of, read_config
from trainer_agent.megatron.families.decoder import EMBEDDING, OUTPUT
from trainer_agent.megatron.families.rules import Entry, Place
from trainer_agent.megatron.parameters import named_parameters

INDEX = "model.safetensors.index.json"


class HfWeights:
    """A model directory's tensors by name, read when asked for. A context manager: it holds files open."""

    def __init__(self, directory: Path | str) -> None:
        self._directory = Path(directory)
        self._files = ExitStack()
        self._open: dict[str, Any] = {}
        self._where = _index(self._directory)

    def __enter__(self) -> HfWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.close()

    def __getitem__(self, name: str) -> Tensor:
        """Raises UnsupportedModel when the directory has no such tensor."""
        if name not in self._where:
            raise UnsupportedModel(f"{self._directory} has no tensor {name}")
        file = self._where[name]
        if file not in self._open:
            handle = safe_open(self._directory / file, framework="pt")
            self._open[file] = self._files.enter_context(handle)
        tensor: Tensor = self._open[file].get_tensor(name)
        return tensor


@torch.no_grad()
def load_hf(model: Any, path: Path | str) -> None:
    """Fill this rank's parameters from the model directory at `path`. Not a collective.

    Raises:
        UnsupportedModel: a parameter has no mapping, a tensor is missing, or a shape is not the parameter's.
    """
    config = read_config(path)
    family = family_of(config)
    shape = family.shape(config)
    entries = {entry.megatron: entry for entry in family.entries(shape)}
    if shape.tied:
        # With pipeline stages the last one holds a copy of the embedding as its output layer.
        entries[OUTPUT] = entries[EMBEDDING]
    with HfWeights(path) as weights:
        for name, parameter in named_parameters(model):
            if name not in entries:
                raise UnsupportedModel(f"{name} has no mapping")
            parameter.copy_(_shard(entries[name], weights, parameter))


def _shard(entry: Entry, weights: HfWeights, parameter: Tensor) -> Tensor:
    tensors = [weights[tensor.name] for tensor in entry.hf]
    for declared, tensor in zip(entry.hf, tensors, strict=True):
        if tuple(tensor.shape) != declared.shape:
            raise UnsupportedModel(f"{declared.name} is {tuple(tensor.shape)}, its config says {declared.shape}")
    place = _place(entry, tuple(parameter.shape))
    shard = entry.rule.to_megatron(tensors, place)
    if tuple(shard.shape) != place.shape:
        raise UnsupportedModel(f"{entry.megatron} is {place.shape}, the checkpoint gives {tuple(shard.shape)}")
    return shard


def _place(entry: Entry, shape: tuple[int, ...]) -> Place:
    if entry.expert is None:
        rank = parallel_state.get_tensor_model_parallel_rank()
        size = parallel_state.get_tensor_model_parallel_world_size()
    else:
        rank = parallel_state.get_expert_tensor_parallel_rank()
        size = parallel_state.get_expert_tensor_parallel_world_size()
    return Place(rank, size, shape)


def _index(directory: Path) -> Mapping[str, str]:
    """Which file of the directory holds which tensor."""
    index = directory / INDEX
    if index.exists():
        where: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return where
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        return dict.fromkeys(file.keys(), "model.safetensors")
