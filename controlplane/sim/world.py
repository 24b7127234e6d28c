"""A whole simulated fleet: one coordinator, its ledger, each model's engines and trainers, clients, people, fate."""

from __future__ import annotations

from collections.abc import Callable

from controlplane.core.update_policy import UpdatePolicy
from controlplane.core.versions import ModelName
from controlplane.sim.agent import Agent
from controlplane.sim.cast import Cast
from controlplane.sim.clients import Client
from controlplane.sim.coordinator import Coordinator
from controlplane.sim.coverage import Coverage
from controlplane.sim.faults import Faults
from controlplane.sim.kernel import Kernel, Process
from controlplane.sim.people import People
from controlplane.sim.rogue import Rogue
from controlplane.sim.settings import MODELS, POLICIES, POLICY, SimSettings
from controlplane.sim.shelf import Shelf
from controlplane.sim.supervisor import Supervisor
from controlplane.sim.surroundings import Surroundings
from controlplane.sim.team import Team
from controlplane.sim.trainer import Trainer
from controlplane.sim.troubles import Troubles
from controlplane.sim.witness import Violation, Witness

LOOK_SECONDS = 0.1
"""How often it is looked whether all is well."""
UNITS_CHANCE = 0.3
LENDS_CHANCE = 0.4


class World:
    """Everything, under one seed."""

    def __init__(self, seed: int, settings: SimSettings | None = None) -> None:
        self.seed = seed
        self.settings = settings or SimSettings()
        self.kernel = Kernel(seed)
        self.coverage = Coverage()
        self.supervisor = Supervisor(self.kernel, "supervisor")
        self.faults = Faults(self.kernel, self.settings, self.coverage, self.supervisor)
        self.shelf = Shelf()
        self.policy = self._chosen(self.settings)
        self.witness = Witness(self.kernel, self.coverage, self.settings.lease_ttl, self.policy)
        self.around = Surroundings(
            self.kernel,
            self.settings,
            self.policy,
            self.coverage,
            self.witness,
            self.supervisor,
            self.faults,
            self.shelf,
        )
        self.agents: dict[str, Agent] = {}
        self.coordinator = Coordinator(self.around, self.agents)
        self.teams = {name: self._team(name, count) for name, count in self.settings.fleet().items()}
        self.agents |= {n: a for team in self.teams.values() for n, a in team.agents.items()}
        self._cast = Cast(self.coordinator, self.teams, self.agents)
        names = [f"client{i}" for i in range(self.settings.clients)]
        self.clients = [Client(self.kernel, name, self.coordinator, self.agents) for name in names]
        self.people = People(self.around, self._cast)
        self.rogue = Rogue(self.around, self._cast)
        self.troubles = Troubles(self.around, self._cast, self.people, self.rogue)

    def _chosen(self, settings: SimSettings) -> UpdatePolicy:
        enough = [p for p in POLICIES if len(p.min_engines) <= settings.fleet().get(POLICY, 0)]
        policy = self.kernel.rng.choice(enough)
        return policy if settings.policy is None else settings.policy

    def _team(self, name: ModelName, count: int) -> Team:
        spec, rng = MODELS[name], self.kernel.rng
        units, lends = rng.random() < UNITS_CHANCE, rng.random() < LENDS_CHANCE
        units = units if self.settings.units is None else self.settings.units
        lends = lends if self.settings.lends is None else self.settings.lends
        streaming = self._streaming(count)
        trained = not spec.frozen
        team = Team(
            self.around,
            self.coordinator,
            spec,
            count,
            units=units and trained,
            lends=lends and trained,
            streaming=streaming * trained,
        )
        for agent in team.agents.values():
            self.witness.met(agent)
        return team

    def _streaming(self, count: int) -> int:
        """Beside staged engines they get whole versions, unless their devices are their trainer's; so mostly all or
        none of them stream."""
        rng = self.kernel.rng
        chosen = rng.choice((0, count, rng.randint(0, count)))
        return chosen if self.settings.streaming is None else self.settings.streaming

    def start(self, *, trainer: bool = True) -> None:
        """Everything comes up at once."""
        self.supervisor.start()
        self.people.start()
        self.rogue.start()
        for process in (self.coordinator, *self.agents.values()):
            process.on_death = lambda process=process: self.supervisor.restart(process)  # type: ignore[misc]
            process.start()
        for client in self.clients:
            client.start()
        for team in self.teams.values():
            if trainer and not team.spec.frozen:
                team.new_trainer()

    @property
    def trainers(self) -> list[Trainer]:
        """Those that were not fenced."""
        return self._cast.trainers

    def processes(self) -> list[Process]:
        """Those that faults may meet."""
        return self._cast.processes()

    # ---- running ----

    def run_events(self, count: int) -> None:
        end = self.kernel.events + count
        while self.kernel.events < end and self.kernel.step():
            pass

    def run_until(self, good: Callable[[], bool], limit: float, what: str, look_seconds: float = LOOK_SECONDS) -> None:
        """Until `good()` holds, asked after every `look_seconds`. Raises Violation after `limit` seconds."""
        end, look = self.kernel.now + limit, self.kernel.now
        while not (self.kernel.now >= look and good()):
            if self.kernel.now >= look:
                look = self.kernel.now + look_seconds
            if self.kernel.now > end or not self.kernel.step():
                raise Violation("liveness", f"not within {limit} s: {what}; {self.describe()}")

    def settle(self) -> None:
        """Faults stop; then every engine serves what it is to serve, within the limit: a version that was committed
        since, or the one that it stays at. Then those are released, and serve such a version too."""
        self.troubles.stop()
        if self.coordinator.ledger.kept.stays:
            self._settle()
        self.people.releases = True
        self.run_until(lambda: not self.coordinator.ledger.kept.stays, 10.0, "every engine is released")
        self._settle()

    def _settle(self) -> None:
        number = max((v.number for team in self.teams.values() for v in team.served), default=0)
        for team in self.teams.values():
            if not team.trainers and not team.spec.frozen:
                team.new_trainer(takeover=True)
        self.run_until(lambda: self.well(above=number), self.settings.settle_limit, "every engine serves")

    def well(self, above: int = 0) -> bool:
        """A version above that number is served of every trained model, by every engine, and routed to."""
        return all(team.well(above) for team in self.teams.values())

    def describe(self) -> str:
        """Where everybody stands, for a report of what went wrong."""
        teams = "; ".join(team.describe() for team in self.teams.values())
        return f"{teams}; recovering {self.coordinator.core.recovering}"
