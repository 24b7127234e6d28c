"""From a fleet file to what a daemon takes: its settings, checked as its own file's would be."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from controlplane.config import ConfigError, load_values, merged
from controlplane.coordinator.daemon import CoordinatorSettings
from controlplane.fleet_file import (
    Device,
    EngineEntry,
    FleetFile,
    TrainerEntry,
    coordinator_settings,
    engines_of,
    read_fleet_file,
    trainers_of,
)
from engine_agent.daemon.settings import EngineSettings
from engine_agent.members.member import MemberSettings
from engine_agent.vllm.environment import gpu_present
from trainer_agent.agent.settings import TrainerSettings

T = TypeVar("T")


@dataclass(frozen=True)
class CheckedFleet:
    """A fleet file whose every process could be started with its settings."""

    file: FleetFile
    coordinator: CoordinatorSettings
    engines: tuple[EngineSettings, ...]
    trainers: tuple[CheckedTrainer, ...]


@dataclass(frozen=True)
class CheckedTrainer:
    """A trainer agent's settings, and what its ranks run on which devices."""

    settings: TrainerSettings
    command: tuple[str, ...]
    devices: tuple[Device, ...]
    """Of the engines beside it; empty: any."""


def checked(file: Path) -> CheckedFleet:
    """Read and check all of it. Raises ConfigError: the file, the key, and what was expected."""
    fleet = read_fleet_file(file)
    entries = engines_of(fleet, gpu=gpu_present())
    engines = tuple(_engine(file, entry, {}) for entry in entries)
    trainers = tuple(_trainer(file, entry, {}) for entry in trainers_of(fleet))
    return CheckedFleet(fleet, coordinator_of(file, {}), engines, trainers)


def coordinator_of(file: Path, given: Mapping[str, Any]) -> CoordinatorSettings:
    """The coordinator's settings; `given` goes over the file's. Raises ConfigError."""
    values = merged(coordinator_settings(read_fleet_file(file)), given)
    return load_values(CoordinatorSettings, values, base=file.resolve().parent, source=f"{file}: coordinator")


def engine_of(file: Path, engine_id: str, given: Mapping[str, Any]) -> EngineSettings:
    """One engine's settings; `given` goes over the file's. Raises ConfigError: also if the file has no such engine."""
    entries = {entry.engine_id: entry for entry in engines_of(read_fleet_file(file), gpu=gpu_present())}
    return _engine(file, _found("engine", engine_id, entries, file), given)


def member_of(file: Path, engine_id: str, given: Mapping[str, Any]) -> MemberSettings:
    """A further node's of one engine: its run and its TLS. Raises ConfigError: also if the engine has no such nodes."""
    engine = engine_of(file, engine_id, {})
    source = f"{file}: member of {engine_id}"
    if engine.vllm is None or not engine.vllm.further_nodes:
        raise ConfigError("vllm.further_nodes", "the engine has no further nodes, and waits for no member", source)
    values = merged({"run_id": engine.run_id, "engine_id": engine_id}, given)
    found = load_values(MemberSettings, values, source=source)
    return found if "tls" in given else replace(found, tls=engine.tls)


def trainer_of(file: Path, trainer_id: str, given: Mapping[str, Any]) -> CheckedTrainer:
    """One trainer's, as `engine_of`. Raises ConfigError: also if its script is not there."""
    entries = {entry.trainer_id: entry for entry in trainers_of(read_fleet_file(file))}
    return _trainer(file, _found("trainer", trainer_id, entries, file), given)


def _found(kind: str, name: str, entries: Mapping[str, T], file: Path) -> T:
    if name not in entries:
        near = difflib.get_close_matches(name, entries, n=1)
        known = f"did you mean {near[0]}?" if near else f"it has {', '.join(entries) or 'none'}"
        raise ConfigError(name, f"no {kind} of the fleet file has this id; {known}", str(file))
    return entries[name]


def _trainer(file: Path, entry: TrainerEntry, given: Mapping[str, Any]) -> CheckedTrainer:
    source = f"{file}: trainer {entry.trainer_id}"
    if not Path(entry.command[0]).is_file():
        raise ConfigError("script", f"{entry.command[0]} is not there", source)
    values = merged(entry.settings, given)
    settings = load_values(TrainerSettings, values, base=file.resolve().parent, source=source)
    return CheckedTrainer(settings, entry.command, entry.devices)


def _engine(file: Path, entry: EngineEntry, given: Mapping[str, Any]) -> EngineSettings:
    values = merged(entry.settings, given)
    return load_values(EngineSettings, values, base=file.resolve().parent, source=f"{file}: engine {entry.engine_id}")
