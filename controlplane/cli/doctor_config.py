"""What a file of settings is for, and what of it `weightplane doctor` looks at.

Promises that a file is read as its daemon reads it: what the daemon would refuse at its start is refused here too, with
the same words. Whose file it is follows from its keys: `groups` or a table `coordinator` is a fleet's, `engine_id` an
engine agent's, `coordinator` a trainer agent's; else it is the coordinator's.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controlplane.config import load, read
from controlplane.core.access import Role
from controlplane.rpc.security import TlsSettings

if TYPE_CHECKING:
    from controlplane.coordinator.daemon import CoordinatorSettings
    from engine_agent.daemon.settings import EngineSettings
    from trainer_agent.agent.settings import TrainerSettings

YAML = (".yaml", ".yml")


@dataclass(frozen=True, slots=True)
class Daemon:
    """A process that the file is for."""

    role: Role
    name: str
    """Of the engine or the trainer; empty: it has none."""
    run_id: str
    """Empty: it takes the coordinator's."""
    tls: TlsSettings
    called_at: str
    """The address that others call it by, as far as the file says; else that it listens on."""
    link_host: str = ""
    checkpoint_root: Path | None = None
    http_tokens: Path | None = None
    """File of the tokens that its page or its OpenAI door takes, if they are others than its ports'."""

    def __str__(self) -> str:
        return self.name or self.role.value


def daemons_of(file: Path) -> list[Daemon]:
    """Of a fleet file each of its processes. Raises ConfigError, InvalidRequest: what its daemon would refuse."""
    given: dict[str, Any] = {} if file.suffix in YAML else read(file, tomllib.loads, tomllib.TOMLDecodeError, "TOML")
    if file.suffix in YAML or "groups" in given or isinstance(given.get("coordinator"), dict):
        return _of_fleet(file)
    if "engine_id" in given:
        from engine_agent.daemon.settings import EngineSettings

        return [_engine(load(EngineSettings, file))]
    if "coordinator" in given:
        from trainer_agent.agent.settings import TrainerSettings

        return [_trainer(load(TrainerSettings, file))]
    from controlplane.coordinator.daemon import CoordinatorSettings

    return [_coordinator(load(CoordinatorSettings, file))]


def _of_fleet(file: Path) -> list[Daemon]:
    from controlplane.cli.up.settings import checked

    fleet = checked(file)
    return [_coordinator(fleet.coordinator), *map(_engine, fleet.engines)]


def _coordinator(found: CoordinatorSettings) -> Daemon:
    return Daemon(Role.COORDINATOR, "", found.run_id, found.tls, found.listen, http_tokens=found.web_tokens)


def _engine(found: EngineSettings) -> Daemon:
    at = found.advertise or found.listen
    root, tokens = found.checkpoint_root, None if found.openai is None else found.openai.tokens
    return Daemon(Role.ENGINE, found.engine_id, found.run_id, found.tls, at, checkpoint_root=root, http_tokens=tokens)


def _trainer(found: TrainerSettings) -> Daemon:
    root = found.checkpoint_root
    return Daemon(Role.TRAINER, found.trainer_id, found.run_id, found.tls, found.listen, found.link_host, root)
