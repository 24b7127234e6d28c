"""What a fleet file may say, as frozen dataclasses, and what it may not.

Tables of the coordinator and of engines are passed on as they are: whoever takes them knows their keys, and refuses
others. What is checked here is what only the whole shows: names, devices, pairs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from controlplane.fleet_file.trainers import TrainerTable

Device = int | str
"""A number of this host's devices, or a UUID such as `GPU-…`."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
MAX_ENGINES = 10_000
COORDINATOR = "coordinator"
"""The name of its process, which no other has."""


class Role(Enum):
    """What a group's engines are for."""

    REGULAR = "regular"
    """They generate with the model that its trainer pushes."""
    FROZEN = "frozen"
    """They serve what they load, as number 0, and are never updated: a teacher, a reference."""
    PREFILL = "prefill"
    """Half of a disaggregated pair: they prefill."""
    DECODE = "decode"
    """The other half: they decode."""


PAIRED = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True)
class GroupSettings:
    """Engines that are alike."""

    name: str
    """Their ids are `NAME-0`, `NAME-1`, …; what a policy's minimum counts them under."""
    count: int = 1
    """How many."""
    model: str = "policy"
    """The set of weights that they serve: versions, leases and routes are per model."""
    role: Role = Role.REGULAR
    """regular, frozen, prefill or decode."""
    pair: str = ""
    """Of prefill and decode groups: groups of one pair take a version together, behind one gate."""
    tensor_parallel_size: int = 1
    """Devices of one engine, times `vllm.data_parallel_size` and pipeline_parallel_size of `vllm.vllm_arguments`."""
    devices: tuple[Device, ...] = ()
    """Numbers or UUIDs, taken in order: so many for the first engine, then for the next. Empty: any."""
    min_engines: int = 0
    """So many of them must be ready, and apply, whatever the update policy says."""
    vllm: Mapping[str, Any] = field(default_factory=dict)
    """Settings of vLLM, over those of the file's `[vllm]`."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the engine agents, over those of the file's `[engine]`."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"a group's name is letters, digits, dots and dashes, not {self.name!r}")
        if self.count < 0 or self.tensor_parallel_size < 1 or self.min_engines < 0:
            raise ValueError(f"{self.name}: count and min_engines are 0 or more, tensor_parallel_size 1 or more")
        if bool(self.pair) != (self.role in PAIRED):
            raise ValueError(f"{self.name}: pair goes with the roles prefill and decode, and only with them")
        if self.min_engines > self.count:
            raise ValueError(f"{self.name}: min_engines is {self.min_engines}, and it has {self.count} engines")
        if len({type(d) for d in self.devices}) > 1:
            raise ValueError(f"{self.name}: devices are numbers or UUIDs, not both")
        needed = self.count * self.devices_each
        if self.devices and len(self.devices) != needed:
            have = f"{len(self.devices)} devices"
            raise ValueError(f"{self.name}: {self.count} engines of {self.devices_each} need {needed}, not {have}")

    @property
    def devices_each(self) -> int:
        """Devices of one engine: tensor × pipeline × data parallel."""
        arguments = self.vllm.get("vllm_arguments", {})
        pipeline = arguments.get("pipeline_parallel_size", 1) if isinstance(arguments, Mapping) else 1
        return self.tensor_parallel_size * int(pipeline) * int(self.vllm.get("data_parallel_size", 1))


@dataclass(frozen=True)
class FleetFile:
    """A fleet."""

    run_id: str = "default"
    """The training run."""
    address: str = "127.0.0.1:7070"
    """Where the coordinator is reached; it listens there unless `[coordinator] listen` says otherwise."""
    state_dir: Path = Path("weightplane-state")
    """What must survive: the ledger, and a file for each engine."""
    checkpoint_root: Path | None = None
    """Where trainers keep checkpoints and engines read them."""
    coordinator: Mapping[str, Any] = field(default_factory=dict)
    """Further settings of the coordinator, such as update_mode."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Settings of every engine agent."""
    vllm: Mapping[str, Any] = field(default_factory=dict)
    """Settings of every engine's vLLM."""
    groups: tuple[GroupSettings, ...] = ()
    """The engines."""
    trainer: Mapping[str, Any] = field(default_factory=dict)
    """Settings of every trainer agent."""
    trainers: tuple[TrainerTable, ...] = ()
    """Trainer agents that are started with the engines."""

    def __post_init__(self) -> None:
        if self.address.endswith(":0"):
            raise ValueError(f"address is what engines are told, so it needs a port: {self.address}")
        if sum(g.count for g in self.groups) > MAX_ENGINES:
            raise ValueError(f"a fleet file has at most {MAX_ENGINES} engines")
        twice = [name for name, times in Counter(g.name for g in self.groups).items() if times > 1]
        if twice:
            raise ValueError(f"two groups have the name {twice[0]}")
        self._check_devices()
        self._check_pairs()
        self._check_trainers()

    def _check_devices(self) -> None:
        taken: dict[Device, str] = {}
        for group in self.groups:
            for device in group.devices:
                if device in taken:
                    raise ValueError(f"device {device} is given to {taken[device]} and to {group.name}")
                taken[device] = group.name

    def _check_pairs(self) -> None:
        for pair in {g.pair for g in self.groups if g.pair}:
            groups = [g for g in self.groups if g.pair == pair]
            if {g.role for g in groups} != set(PAIRED):
                raise ValueError(f"the pair {pair} needs a group of role prefill and one of role decode")
            models = sorted({g.model for g in groups})
            if len(models) > 1:
                raise ValueError(f"the pair {pair} has one model, not {' and '.join(models)}")

    def _check_trainers(self) -> None:
        engines = {f"{g.name}-{number}" for g in self.groups for number in range(g.count)}
        taken: dict[str, str] = {}
        for trainer in self.trainers:
            if not _NAME.fullmatch(trainer.name):
                raise ValueError(f"a trainer's name is letters, digits, dots and dashes, not {trainer.name!r}")
            if trainer.name in {*engines, COORDINATOR}:
                raise ValueError(f"the name {trainer.name} is given to a trainer and to another process")
            for engine in trainer.beside:
                if engine not in engines:
                    raise ValueError(f"{trainer.name} is beside {engine}, and no engine of the file has this id")
                if engine in taken:
                    raise ValueError(f"{trainer.name} and {taken[engine]} are both beside {engine}")
                taken[engine] = trainer.name
        twice = [name for name, times in Counter(t.name for t in self.trainers).items() if times > 1]
        if twice:
            raise ValueError(f"two trainers have the name {twice[0]}")

    def pair_size(self, pair: str) -> int:
        """Engines of a pair, of both roles."""
        return sum(g.count for g in self.groups if g.pair == pair)
