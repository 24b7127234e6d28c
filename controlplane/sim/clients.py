"""Rollout clients: they ask for routes, now and then use old ones, and take tokens from engine agents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.core.versions import EngineId
from controlplane.sim.kernel import Process, connect

if TYPE_CHECKING:
    from controlplane.sim.world import World

EVERY_SECONDS = (0.3, 2.0)


class Client(Process):
    """One loop that samples."""

    def __init__(self, world: World, name: str) -> None:
        super().__init__(world.kernel, name)
        self.world = world
        self._routes: list[EngineId] = []

    def boot(self) -> None:
        self.after(self.kernel.rng.uniform(*EVERY_SECONDS), self._ask)

    def _ask(self) -> None:
        self.after(self.kernel.rng.uniform(*EVERY_SECONDS), self._ask)
        stream = connect(self, self.world.coordinator)
        if stream is not None and self.kernel.rng.random() < 0.8:
            coordinator = self.world.coordinator
            stream.to_server(lambda: coordinator.routes(stream, self._take_routes))
            self.after(1.0, stream.cancel)
        self._sample()

    def _take_routes(self, routes: list[EngineId]) -> None:
        self._routes = routes

    def _sample(self) -> None:
        """From a routed engine, or from any: an agent's gate rests on nobody's routing (INV-10)."""
        rng = self.kernel.rng
        anyone = list(self.world.agents)
        agent = self.world.agents[rng.choice(self._routes if self._routes and rng.random() < 0.7 else anyone)]
        stream = connect(self, agent)
        if stream is None:
            return
        tokens = rng.randint(1, 6)
        wanted = 10**6 if rng.random() < 0.02 else None
        stream.to_server(lambda: agent.present.generate(stream, tokens, wanted))
