"""One model's engines, and how its trainers are to treat them."""

from __future__ import annotations

from controlplane.sim.agent import Agent
from controlplane.sim.settings import ModelSpec


class Roster:
    """What a trainer knows of the model that it trains."""

    def __init__(self, spec: ModelSpec, agents: dict[str, Agent], shared: list[Agent]) -> None:
        self.spec = spec
        self.agents = agents
        self.shared = shared
        """Engines on the devices of whoever trains the model."""
        self.borrows = False
        """Its trainers take the shared devices between pushes."""
        self.rests = False
        """Its trainers push nothing now."""
