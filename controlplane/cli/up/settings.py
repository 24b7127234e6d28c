"""From a fleet file to what a daemon takes: its settings, checked as its own file's would be."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controlplane.config import ConfigError, load_values, merged
from controlplane.coordinator.daemon import CoordinatorSettings
from controlplane.fleet_file import EngineEntry, FleetFile, coordinator_settings, engines_of, read_fleet_file
from engine_agent.settings import EngineSettings
from engine_agent.vllm.environment import gpu_present


@dataclass(frozen=True)
class CheckedFleet:
    """A fleet file whose every process could be started with its settings."""

    file: FleetFile
    coordinator: CoordinatorSettings
    engines: tuple[EngineSettings, ...]


def checked(file: Path) -> CheckedFleet:
    """Read and check all of it. Raises ConfigError: the file, the key, and what was expected."""
    fleet = read_fleet_file(file)
    entries = engines_of(fleet, gpu=gpu_present())
    return CheckedFleet(fleet, coordinator_of(file, {}), tuple(_engine(file, entry, {}) for entry in entries))


def coordinator_of(file: Path, given: Mapping[str, Any]) -> CoordinatorSettings:
    """The coordinator's settings; `given` goes over the file's. Raises ConfigError."""
    values = merged(coordinator_settings(read_fleet_file(file)), given)
    return load_values(CoordinatorSettings, values, base=file.resolve().parent, source=f"{file}: coordinator")


def engine_of(file: Path, engine_id: str, given: Mapping[str, Any]) -> EngineSettings:
    """One engine's settings; `given` goes over the file's. Raises ConfigError: also if the file has no such engine."""
    entries = {entry.engine_id: entry for entry in engines_of(read_fleet_file(file), gpu=gpu_present())}
    if engine_id not in entries:
        near = difflib.get_close_matches(engine_id, entries, n=1)
        known = f"did you mean {near[0]}?" if near else f"it has {', '.join(entries) or 'none'}"
        raise ConfigError(engine_id, f"no engine of the fleet file has this id; {known}", str(file))
    return _engine(file, entries[engine_id], given)


def _engine(file: Path, entry: EngineEntry, given: Mapping[str, Any]) -> EngineSettings:
    values = merged(entry.settings, given)
    return load_values(EngineSettings, values, base=file.resolve().parent, source=f"{file}: engine {entry.engine_id}")
