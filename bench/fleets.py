"""A coordinator and N engine agents in few processes, as the product starts them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.coordinator import engines as heard
from bench.coordinator import start_coordinator
from bench.engine_host import RUN
from bench.processes import Processes, processes
from controlplane.cli.ask import get_fleet
from weightplane.v1 import operator_pb2

ENGINES_OF_A_HOST = 256
MIN_HOSTS = 2
"""Processes of engine agents, where there are as many: one for each core of a small machine."""


@dataclass(frozen=True, slots=True)
class Fleet:
    address: str
    processes: Processes
    engines: int

    @property
    def coordinator(self) -> int:
        """Its pid."""
        return self.processes.pids["coordinator"]

    @property
    def hosts(self) -> list[int]:
        """Pids of the processes with engine agents."""
        return [pid for name, pid in self.processes.pids.items() if name.startswith("engines-")]

    def view(self, seconds: float = 20.0) -> operator_pb2.FleetView:
        return asyncio.run(get_fleet(self.address, seconds))

    def known(self) -> int:
        return len(heard(self.address))


@contextmanager
def fleet(directory: Path, engines: int, **settings: Any) -> Iterator[Fleet]:
    """Until all engines are known. `settings` are the coordinator's."""
    directory.mkdir(parents=True, exist_ok=True)
    with processes(directory) as started:
        found = Fleet(start_coordinator(started, RUN, **settings), started, engines)
        for first, count in hosts(engines):
            words = ("-m", "bench.engine_host", found.address, str(directory / "engines"), str(first), str(count))
            started.start(f"engines-{first}", *words)
        started.wait(lambda: found.known() == engines, f"{engines} engines' hellos")
        yield found


def hosts(engines: int) -> Iterator[tuple[int, int]]:
    """First engine and count of each process."""
    size = min(ENGINES_OF_A_HOST, -(-engines // MIN_HOSTS))
    for first in range(0, engines, size):
        yield first, min(size, engines - first)
