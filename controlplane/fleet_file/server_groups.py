"""The server groups of vime's `--vllm-config`, as a fleet file.

    vllm:
      - name: actor
        model_path: /models/m
        server_groups:            # or engine_groups
          - {worker_type: regular, num_gpus: 4, num_gpus_per_engine: 2, overrides: {max_num_seqs: 32}}

Read: sizes cascade from group to model; `update_weights: false` is a frozen model; prefill and decode groups of a model
are a pair; a placeholder takes devices and starts nothing; overrides are vLLM's arguments. Refused: what has no meaning
here (encoder groups, other keys), sizes that do not divide, and prefill and decode groups of a frozen model: a pair
opens its one gate when all of it took a version, and nobody brings one. Devices are numbered from 0 in the order of the
file, as there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from controlplane.config import ConfigError, load_values
from controlplane.fleet_file.settings import FleetFile, GroupSettings, Role

WorkerType = Literal["regular", "prefill", "decode", "placeholder"]


@dataclasses.dataclass(frozen=True)
class _ServerGroup:
    worker_type: WorkerType = "regular"
    num_gpus: int = 1
    num_gpus_per_engine: int | None = None
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Model:
    name: str
    model_path: str
    update_weights: bool = True
    num_gpus_per_engine: int = 1
    server_groups: tuple[_ServerGroup, ...] = ()


@dataclasses.dataclass(frozen=True)
class _File:
    vllm: tuple[_Model, ...]


def fleet_of(document: object, source: str) -> FleetFile:
    """Raises ConfigError: the document is not of that shape, or a size does not divide."""
    if not isinstance(document, Mapping):
        raise ConfigError("", "expected a table with the key vllm", source)
    file = load_values(_File, _renamed(document), source=source)
    try:
        return FleetFile(groups=tuple(_groups(file)))
    except ValueError as error:
        raise ConfigError("vllm", str(error), source) from error


def _renamed(document: Mapping[str, Any]) -> dict[str, Any]:
    """`engine_groups` is an older name of `server_groups`, and `sglang` of the list of models."""
    models = document.get("vllm", document.get("sglang"))
    rest = {k: v for k, v in document.items() if k not in ("vllm", "sglang")}
    if not isinstance(models, list):
        return rest | {"vllm": models}
    return rest | {"vllm": [_with_server_groups(m) for m in models]}


def _with_server_groups(model: object) -> object:
    if not isinstance(model, Mapping) or "engine_groups" not in model:
        return model
    return {k: v for k, v in model.items() if k != "engine_groups"} | {"server_groups": model["engine_groups"]}


def _groups(file: _File) -> Iterator[GroupSettings]:
    first = 0
    for model in file.vllm:
        for number, group in enumerate(model.server_groups):
            if group.worker_type != "placeholder":
                yield _group(model, number, group, first)
            first += group.num_gpus


def _group(model: _Model, number: int, group: _ServerGroup, first: int) -> GroupSettings:
    each = group.num_gpus_per_engine or model.num_gpus_per_engine
    if each < 1 or group.num_gpus % each:
        raise ValueError(f"{model.name}, group {number}: {group.num_gpus} devices do not divide by {each}")
    role = _role(model, number, group.worker_type)
    return GroupSettings(
        name=f"{model.name}-{group.worker_type}-{number}" if len(model.server_groups) > 1 else model.name,
        count=group.num_gpus // each,
        model=model.name,
        role=role,
        pair=model.name if role in (Role.PREFILL, Role.DECODE) else "",
        tensor_parallel_size=each,
        devices=tuple(range(first, first + group.num_gpus)),
        vllm={"model": str(Path(model.model_path)), "vllm_arguments": dict(group.overrides)},
    )


def _role(model: _Model, number: int, worker_type: WorkerType) -> Role:
    if model.update_weights:
        return Role(worker_type)
    if worker_type != "regular":
        problem = f"{worker_type} engines wait for a version of their pair, which update_weights: false never brings"
        raise ValueError(f"{model.name}, group {number}: {problem}; a frozen model has worker_type: regular")
    return Role.FROZEN
