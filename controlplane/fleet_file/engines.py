"""From a fleet file to the settings of each process. Pure: the same file gives the same settings on every host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from controlplane.fleet_file.settings import Device, FleetFile, GroupSettings, Role
from controlplane.fleet_file.trainers import TrainerTable

MEMORY = "memory"
"""The engine backend that has no vLLM."""


@dataclass(frozen=True)
class EngineEntry:
    """One engine of the file."""

    engine_id: str
    group: str
    settings: Mapping[str, Any]
    """Of its agent, nested as the agent's own file is."""


@dataclass(frozen=True)
class TrainerEntry:
    """One trainer agent of the file."""

    trainer_id: str
    settings: Mapping[str, Any]
    """Of its agent, nested as the agent's own file is."""
    command: tuple[str, ...]
    """What each rank runs: a script and its arguments."""
    devices: tuple[Device, ...]
    """Of the engines that it is beside, in their order; empty: any."""


def engines_of(fleet: FleetFile, *, gpu: bool) -> tuple[EngineEntry, ...]:
    """Every engine, in the file's order. `gpu`: the host has GPUs, so device numbers are theirs."""
    return tuple(entry for group in fleet.groups for entry in _engines(fleet, group, gpu=gpu))


def coordinator_settings(fleet: FleetFile) -> dict[str, Any]:
    """Settings of the coordinator, nested as its own file is."""
    settings = {"listen": fleet.address, "run_id": fleet.run_id, "state_dir": str(fleet.state_dir / "coordinator")}
    minimums = [f"{g.name}={g.min_engines}" for g in fleet.groups if g.min_engines]
    return settings | ({"min_engines": minimums} if minimums else {}) | dict(fleet.coordinator)


def trainers_of(fleet: FleetFile) -> tuple[TrainerEntry, ...]:
    """Every trainer agent, in the file's order."""
    return tuple(_trainer(fleet, table) for table in fleet.trainers)


def _trainer(fleet: FleetFile, table: TrainerTable) -> TrainerEntry:
    settings: dict[str, Any] = {
        "coordinator": fleet.address,
        "run_id": fleet.run_id,
        "trainer_id": table.name,
        "model": table.model,
        "nproc_per_node": table.ranks,
        "state_dir": str(fleet.state_dir / "trainers" / table.name),
    }
    if fleet.checkpoint_root is not None:
        settings["checkpoint_root"] = str(fleet.checkpoint_root)
    settings |= dict(fleet.trainer) | dict(table.settings)
    devices = tuple(d for engine in table.beside for d in devices_of(fleet, engine))
    return TrainerEntry(table.name, settings, (str(table.script), *table.arguments), devices)


def devices_of(fleet: FleetFile, engine_id: str) -> tuple[Device, ...]:
    """What the file gives to one engine; empty: any, or no such engine."""
    for group in fleet.groups:
        name, _, number = engine_id.rpartition("-")
        if name == group.name and number.isdecimal() and int(number) < group.count:
            return _share(group, int(number))
    return ()


def _share(group: GroupSettings, number: int) -> tuple[Device, ...]:
    first = number * group.devices_each
    return group.devices[first : first + group.devices_each]


def _engines(fleet: FleetFile, group: GroupSettings, *, gpu: bool) -> Iterator[EngineEntry]:
    for number in range(group.count):
        engine_id = f"{group.name}-{number}"
        settings = _common(fleet, group) | {"engine_id": engine_id} | _of_role(fleet, group)
        settings |= dict(fleet.engine) | dict(group.engine)
        if settings.get("backend") != MEMORY:
            settings["vllm"] = _vllm(fleet, group)
        yield EngineEntry(engine_id, group.name, _with_devices(settings, _share(group, number), gpu=gpu))


def _common(fleet: FleetFile, group: GroupSettings) -> dict[str, Any]:
    common: dict[str, Any] = {
        "coordinator": fleet.address,
        "run_id": fleet.run_id,
        "state_dir": str(fleet.state_dir / "engines"),
        "model": group.model,
        "group": group.name,
    }
    return common if fleet.checkpoint_root is None else common | {"checkpoint_root": str(fleet.checkpoint_root)}


def _of_role(fleet: FleetFile, group: GroupSettings) -> dict[str, Any]:
    if group.role is Role.FROZEN:
        return {"initial": "serve"}
    return {"unit": group.pair, "unit_size": fleet.pair_size(group.pair)} if group.pair else {}


def _vllm(fleet: FleetFile, group: GroupSettings) -> dict[str, Any]:
    """The file's, then the group's; `vllm_arguments` of both are joined."""
    arguments = {**fleet.vllm.get("vllm_arguments", {}), **group.vllm.get("vllm_arguments", {})}
    settings = {"tensor_parallel_size": group.tensor_parallel_size, **fleet.vllm, **group.vllm}
    return settings | ({"vllm_arguments": arguments} if arguments else {})


def _with_devices(settings: dict[str, Any], devices: tuple[Device, ...], *, gpu: bool) -> dict[str, Any]:
    """Numbers of a host without GPUs are the agent's to name; GPUs are what vLLM is let see."""
    if not devices:
        return settings
    if settings.get("backend") == MEMORY or not gpu:
        return settings | {"cpu_devices": list(devices)}
    return settings | {"vllm": settings["vllm"] | {"visible_devices": [str(d) for d in devices]}}
