"""A coordinator among a row's processes, started as people start it, and what it says of its engines."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from bench.processes import Processes, write_toml
from controlplane.cli.ask import get_fleet
from controlplane.cli.ending import CommandFailed
from weightplane.v1 import operator_pb2

VIEW_SECONDS = 20.0


def start_coordinator(started: Processes, run_id: str, **settings: Any) -> str:
    """Its address. `settings`: beside the few that every row needs."""
    directory = started.directory
    address_file = directory / "address"
    values = {"listen": "127.0.0.1:0", "address_file": str(address_file), "run_id": run_id, "state_dir": str(directory)}
    config = write_toml(directory / "coordinator.toml", values | settings)
    started.start("coordinator", "-m", "controlplane.cli.main", "coordinator", "--config", str(config))
    started.wait(address_file.exists, "the coordinator's start")
    return address_file.read_text()


def engines(address: str) -> list[operator_pb2.EngineView]:
    """Those that it hears now; none while it does not answer."""
    with suppress(CommandFailed):
        return [e for e in asyncio.run(get_fleet(address, VIEW_SECONDS)).engines if e.known]
    return []
