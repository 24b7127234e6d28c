"""Rollout clients: they ask for routes, now and then use old ones, and take tokens from engine agents."""

from __future__ import annotations

from collections.abc import Mapping

from controlplane.core.versions import EngineId
from controlplane.sim.agent import Agent
from controlplane.sim.coordinator import Coordinator
from controlplane.sim.kernel import Kernel, Process, connect

EVERY_SECONDS = (0.3, 2.0)


class Client(Process):
    """One loop that samples."""

    def __init__(self, kernel: Kernel, name: str, coordinator: Coordinator, agents: Mapping[str, Agent]) -> None:
        super().__init__(kernel, name)
        self._coordinator = coordinator
        self._agents = agents
        self._routes: list[EngineId] = []

    def boot(self) -> None:
        self.after(self.kernel.rng.uniform(*EVERY_SECONDS), self._ask)

    def _ask(self) -> None:
        self.after(self.kernel.rng.uniform(*EVERY_SECONDS), self._ask)
        stream = connect(self, self._coordinator)
        if stream is not None and self.kernel.rng.random() < 0.8:
            coordinator = self._coordinator
            stream.to_server(lambda: coordinator.routes(stream, self._take_routes))
            self.after(1.0, stream.cancel)
        self._sample()

    def _take_routes(self, routes: list[EngineId]) -> None:
        self._routes = routes

    def _sample(self) -> None:
        """From a routed engine, or from any: an agent's gate rests on nobody's routing (INV-10)."""
        rng = self.kernel.rng
        anyone = list(self._agents)
        agent = self._agents[rng.choice(self._routes if self._routes and rng.random() < 0.7 else anyone)]
        stream = connect(self, agent)
        if stream is None:
            return
        tokens = rng.randint(1, 6)
        wanted = 10**6 if rng.random() < 0.02 else None
        stream.to_server(lambda: agent.present.generate(stream, tokens, wanted))
