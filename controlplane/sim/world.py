"""A whole simulated fleet: one coordinator, its ledger, engine agents, trainers, clients, and what keeps them alive."""

from __future__ import annotations

from collections.abc import Callable

from controlplane.core.versions import WeightVersion
from controlplane.sim.agent import Agent
from controlplane.sim.clients import Client
from controlplane.sim.coordinator import Coordinator
from controlplane.sim.coverage import Coverage
from controlplane.sim.faults import Faults
from controlplane.sim.kernel import Kernel, Process
from controlplane.sim.rogue import Rogue
from controlplane.sim.settings import POLICIES, POLICY, SimSettings
from controlplane.sim.trainer import Trainer
from controlplane.sim.witness import Violation, Witness

RESTART_SECONDS = (0.1, 3.0)
LOOK_SECONDS = 0.1
"""How often it is looked whether all is well."""


class Supervisor(Process):
    """Stands for launchers, networks and fate; never fails itself."""

    def boot(self) -> None:
        pass


class World:
    """Everything, under one seed."""

    def __init__(self, seed: int, settings: SimSettings | None = None) -> None:
        self.seed = seed
        self.settings = settings or SimSettings()
        self.kernel = Kernel(seed)
        self.policy = self.kernel.rng.choice(POLICIES) if self.settings.policy is None else self.settings.policy
        self.coverage = Coverage()
        self.witness = Witness(self.kernel, self.coverage, self.settings.lease_ttl)
        self.faults = Faults(self)
        self.supervisor = Supervisor(self.kernel, "supervisor")
        self.coordinator = Coordinator(self)
        self.agents = {f"e{i}": Agent(self, f"e{i}") for i in range(self.settings.engines)}
        self.clients = [Client(self, f"c{i}") for i in range(self.settings.clients)]
        self.rogue = Rogue(self)
        self.trainers: list[Trainer] = []
        """Those that were not fenced."""
        self._trainers_made = 0
        self._content = 1000

    def start(self, *, trainer: bool = True) -> None:
        """Everything comes up at once."""
        self.supervisor.start()
        self.rogue.start()
        for process in (self.coordinator, *self.agents.values()):
            process.on_death = lambda process=process: self._died(process)  # type: ignore[misc]
            process.start()
        for client in self.clients:
            client.start()
        if trainer:
            self.new_trainer()

    def processes(self) -> list[Process]:
        """Those that faults may meet."""
        return [self.coordinator, *self.agents.values(), *self.trainers]

    def new_trainer(self, *, takeover: bool = False) -> Trainer:
        trainer = Trainer(self, f"t{self._trainers_made}", takeover=takeover)
        self._trainers_made += 1
        self.trainers.append(trainer)
        trainer.on_death = lambda: self._trainer_died(trainer)
        trainer.start()
        return trainer

    def next_content(self) -> int:
        """Weights that no version had before."""
        self._content += 1
        return self._content

    # ---- launchers ----

    def _died(self, process: Process) -> None:
        self.supervisor.after(self.kernel.rng.uniform(*RESTART_SECONDS), process.start)

    def _trainer_died(self, trainer: Trainer) -> None:
        """One that was fenced stays away; when none is left somebody starts a new one."""
        if not trainer.fenced:
            self._died(trainer)
            return
        self.trainers.remove(trainer)
        if not self.trainers:
            self.new_trainer(takeover=self.kernel.rng.random() < 0.5)

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
        """Faults stop; then every engine serves a version that was committed since, within the limit."""
        self.faults.stop()
        number = max((v.number for v in self.served), default=0)
        if not self.trainers:
            self.new_trainer(takeover=True)
        self.run_until(lambda: self.well(above=number), self.settings.settle_limit, "every engine serves")

    @property
    def served(self) -> tuple[WeightVersion, ...]:
        return self.coordinator.core.model(POLICY).served

    def well(self, above: int = 0) -> bool:
        """A version above that number is served, by every engine, and routed to."""
        if not self.coordinator.up or not any(v.number > above for v in self.served):
            return False
        core = self.coordinator.core
        return all(
            a.up and a.present.open and a.name in core.engines and core.routable(core.engines[a.engine_id])
            for a in self.agents.values()
        )

    def describe(self) -> str:
        """Where everybody stands, for a report of what went wrong."""
        words = ", ".join(f"{a.name} {a.present.describe() if a.up else 'down'}" for a in self.agents.values())
        updates = [f"{u.update_id} {u.phase.value} {u.cause}" for u in self.coordinator.core.updates.values()][-3:]
        terms = f"served {list(map(str, self.served))}, term {self.coordinator.core.model(POLICY).term}"
        trainers = [f"{t.name} term {t.term} up {t.up}" for t in self.trainers]
        return f"{terms}; {words}; {updates}; {trainers}; recovering {self.coordinator.core.recovering}"
