"""The Ray actor that holds one process of a fleet on its node. Ray's workers import it, so it imports nothing heavy.

It decides nothing: it starts the process with the devices that Ray chose, tells how it ended, and passes a stop on.
What goes through Ray is a command line, an exit code and the end of a log. The process ends with the actor, and the
actor with its node's raylet or with the command that placed it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from controlplane.cli.crew import LOG_LINES_SHOWN
from controlplane.cli.up.places import Process

KILL_SECONDS = 5.0
DEVICES_VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Begun:
    """Where a process runs."""

    pid: int
    address: str
    node: str
    """Ray's id of it."""


class RayProcess:
    """One process. Its other methods run beside `wait`, which takes as long as the process lives."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._log = Path()

    def devices(self) -> list[str]:
        """The GPUs of this actor's bundle, as Ray names them."""
        return [str(device) for device in _ray().get_gpu_ids()]

    def begin(self, process: Process, own: Sequence[str], shared: Sequence[str], logs: str) -> Begun:
        """Start it; its output goes to the end of `logs/NAME.log` on this node."""
        address = str(_ray().util.get_node_ip_address())
        self._log = Path(logs, f"{process.name}.log")
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "controlplane.cli.main", *command_line(process, own, address)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | ({DEVICES_VARIABLE: ",".join(shared)} if shared else {}),
            )
        return Begun(self._process.pid, address, str(_ray().get_runtime_context().get_node_id()))

    def wait(self) -> tuple[int, list[str]]:
        """Until it ends: its exit code, and the last lines of its log."""
        assert self._process is not None
        code = self._process.wait()
        try:
            return code, self._log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
        except OSError:
            return code, []

    def stop(self, seconds: float) -> None:
        """SIGTERM, and SIGKILL when the time is over. Returns when it has ended."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(KILL_SECONDS)


def command_line(process: Process, own: Sequence[str], address: str) -> list[str]:
    """Of a process on a node of this address. Ray's choice of devices goes over the file's: it knows what is free."""
    command, *rest = process.words
    words = [command, "--die-with-parent", str(os.getpid()), *rest]
    if process.listens_anywhere:
        words += ["--set", f"listen={address}:0"]
    if process.takes_devices and own:
        named = ", ".join(f'"{device}"' for device in own)
        words += ["--set", f"vllm.visible_devices=[{named}]"]
    return words


def _ray() -> Any:
    return import_module("ray")
