"""Reads a fleet file: TOML of ours, or the YAML that vime and slime take as `--vllm-config` or `--sglang-config`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from controlplane.config import load, read
from controlplane.fleet_file.server_groups import fleet_of
from controlplane.fleet_file.settings import FleetFile


def read_fleet_file(file: Path) -> FleetFile:
    """By its name's end: `.yaml` and `.yml` are server groups, anything else is TOML.

    Raises:
        ConfigError: it cannot be read, or says what it may not.
    """
    fleet = fleet_of(_yaml(file), str(file)) if file.suffix in (".yaml", ".yml") else load(FleetFile, file)
    return replace(fleet, state_dir=file.resolve().parent / fleet.state_dir)


def _yaml(file: Path) -> object:
    import yaml

    return read(file, yaml.safe_load, yaml.YAMLError, "YAML")
