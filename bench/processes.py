"""Processes that a row measures: started with a log each, ended with the row; what they cost in CPU time and memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

START_SECONDS = 120.0
STOP_SECONDS = 60.0
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
"""Of every measured process: spinning threads of one make another's small operations many times slower."""


class Processes:
    """By name; `with` ends them, the last one first."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *words: str) -> int:
        """A Python of this environment with these words. Its pid."""
        with (self.directory / f"{name}.log").open("wb") as log:
            process = subprocess.Popen([sys.executable, *words], stdout=log, stderr=log, env=os.environ | ENVIRONMENT)
        self._running[name] = process
        return process.pid

    def check(self) -> None:
        """Raises RuntimeError where one ended."""
        for name, process in self._running.items():
            if process.poll() is not None:
                log = (self.directory / f"{name}.log").read_text(errors="replace")
                raise RuntimeError(f"{name} ended with {process.returncode}: {log[-2000:]}")

    def wait(self, check: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not check():
            self.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{what}: not within {seconds:.0f} s")
            time.sleep(0.05)

    def close(self) -> None:
        for process in reversed(self._running.values()):
            process.terminate()
        for process in reversed(self._running.values()):
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    @property
    def pids(self) -> dict[str, int]:
        return {name: process.pid for name, process in self._running.items()}


@contextmanager
def processes(directory: Path) -> Iterator[Processes]:
    found = Processes(directory)
    try:
        yield found
    finally:
        found.close()


def write_toml(path: Path, values: Mapping[str, Any]) -> Path:
    """Plain values only: strings, numbers, booleans, lists of them."""
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))
    return path


# ---- what they cost -----------------------------------------------------------------------------


def cpu_seconds(pids: Iterable[int]) -> float:
    """User and system time so far, of processes and of all their descendants that live."""
    total = 0.0
    for process in _trees(pids):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def pss_bytes(pids: Iterable[int]) -> int:
    """Proportional set size: shared pages count for each by their share."""
    total = 0
    for process in _trees(pids):
        with suppress(OSError):
            for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) * 1024
    return total


def _trees(pids: Iterable[int]) -> list[psutil.Process]:
    found: dict[int, psutil.Process] = {}
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(pid)
            found |= {p.pid: p for p in [root, *root.children(recursive=True)]}
    return list(found.values())
