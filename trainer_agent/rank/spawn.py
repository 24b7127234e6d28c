"""Where a rank finds its trainer agent: started before it (its socket is in the environment), or spawned by it.

Under plain torchrun, Slurm or Ray nobody started one: local rank 0 spawns `trainer_agent.agent.sidecar` with
subprocess, never by fork, and tells the other ranks through torch.distributed's default group.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from controlplane.core.errors import IncompatibleNode, InvalidRequest, PeerLost
from trainer_agent import wire
from trainer_agent.directories import private_directory
from trainer_agent.first_rank import from_first

STOP_SECONDS = 45.0
"""How long a sidecar may take to end after its last rank left: it ends the checkpoint that it writes, says goodbye and
sweeps."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Which rank this process is."""

    rank: int
    world_size: int
    local_rank: int
    restart_count: int
    """The launcher's: ranks of one life of the set share it."""

    @classmethod
    def detect(cls, environment: Mapping[str, str] = os.environ) -> RankPlace:
        """From torch.distributed if it is initialised, else from the launcher's variables, else rank 0 of 1.

        Raises:
            IncompatibleNode: the ranks are spread over several nodes.
        """
        if dist.is_available() and dist.is_initialized():
            rank, world = dist.get_rank(), dist.get_world_size()
        else:
            rank, world = int(environment.get("RANK", "0")), int(environment.get("WORLD_SIZE", "1"))
        here = int(environment.get("LOCAL_WORLD_SIZE", str(world)))
        if here != world:
            raise IncompatibleNode(what="ranks of the trainer on this node", expected=str(world), got=str(here))
        restarts = environment.get(wire.RESTART_COUNT_VARIABLE) or environment.get("TORCHELASTIC_RESTART_COUNT", "0")
        return cls(rank, world, int(environment.get("LOCAL_RANK", str(rank))), int(restarts))


class Sidecar:
    """The trainer agent that this rank spawned."""

    def __init__(self, coordinator: str, run_id: str | None, config: Path | None) -> None:
        self._directory = private_directory()
        self.socket = self._directory / "ranks.sock"
        command = [sys.executable, "-m", "trainer_agent.agent.sidecar", "--coordinator", coordinator]
        command += ["--socket", str(self.socket), "--parent", str(os.getpid()), "--run-id", run_id or ""]
        command += ["--config", str(config)] if config is not None else []
        # A session of its own: Ctrl-C goes to the ranks, and the sidecar ends after them.
        self._process = subprocess.Popen(command, start_new_session=True, stdin=subprocess.DEVNULL)

    def check(self) -> None:
        """Raises PeerLost if it ended."""
        code = self._process.poll()
        if code is not None:
            raise PeerLost(peer="the spawned trainer agent", cause=f"it ended with exit code {code}")

    def stop(self) -> None:
        """Wait until it ended; kill it if it does not."""
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_SECONDS)
        shutil.rmtree(self._directory, ignore_errors=True)


def find_agent(
    coordinator: str | None, run_id: str | None, place: RankPlace, config: Path | None
) -> tuple[Path, Sidecar | None]:
    """The agent's socket, and the sidecar if this rank spawned one, with the settings in `config`. Collective where one
    has to be spawned.

    Raises:
        InvalidRequest: no coordinator is known, or the ranks have no way to tell each other the socket, or there are
        settings for an agent that has its own.
    """
    given = os.environ.get(wire.RANK_SOCKET_VARIABLE)
    if given and config is not None:
        problem = "an agent was started before its ranks, with settings of its own"
        raise InvalidRequest(field="agent_config", problem=problem)
    if given:
        return Path(given), None
    coordinator = coordinator or os.environ.get(wire.COORDINATOR_VARIABLE)
    if not coordinator:
        raise InvalidRequest(field="coordinator", problem=f"neither given nor in {wire.COORDINATOR_VARIABLE}")
    alone = place.world_size == 1
    if not alone and not (dist.is_available() and dist.is_initialized()):
        problem = "initialise it before TrainerRank.join(), or start the ranks with `weightplane trainer`"
        raise InvalidRequest(field="torch.distributed", problem=problem)
    sidecar = Sidecar(coordinator, run_id, config) if place.local_rank == 0 else None
    socket = str(sidecar.socket) if sidecar else ""
    return Path(socket if alone else from_first(str, lambda: socket)), sidecar
