"""Who plays in a world: the coordinator, each model's engines and trainers."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.core.versions import ModelName
from controlplane.sim.agent import Agent
from controlplane.sim.coordinator import Coordinator
from controlplane.sim.kernel import Process
from controlplane.sim.team import Team
from controlplane.sim.trainer import Trainer


@dataclass
class Cast:
    """Those whom clients, people and troubles meet."""

    coordinator: Coordinator
    teams: dict[ModelName, Team]
    agents: dict[str, Agent]
    """Of all models."""

    @property
    def trainers(self) -> list[Trainer]:
        """Those that were not fenced."""
        return [t for team in self.teams.values() for t in team.trainers]

    def processes(self) -> list[Process]:
        """Those that faults may meet."""
        return [self.coordinator, *self.agents.values(), *self.trainers]
