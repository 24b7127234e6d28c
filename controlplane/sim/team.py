"""One model of the run: its engines, its trainers, and what is well with it."""

from __future__ import annotations

from collections import Counter

from controlplane.core.versions import WeightVersion
from controlplane.sim.agent import Agent
from controlplane.sim.coordinator import Coordinator
from controlplane.sim.roster import Roster
from controlplane.sim.seat import Seat
from controlplane.sim.settings import GROUPS, ModelSpec, digest_of
from controlplane.sim.surroundings import Surroundings
from controlplane.sim.trainer import Trainer

UNIT_SIZE = 2
MAX_UNITS = 8
"""Of one model: whatever becomes of one is broadcast to every agent, which is quadratic where all are in units."""


class Team(Roster):
    """A frozen model has no trainers: its engines serve what they loaded."""

    def __init__(
        self,
        around: Surroundings,
        coordinator: Coordinator,
        spec: ModelSpec,
        engines: int,
        *,
        units: bool,
        lends: bool,
        streaming: int,
    ) -> None:
        """`units`: the engines serve in pairs, those beyond MAX_UNITS alone. `lends`: half of them share their
        trainer's devices, and sleep while it trains. `streaming`: so many install updates as they come."""
        self._around = around
        self._coordinator = coordinator
        content = around.next_content() if spec.frozen else None
        seats = [self._seat(spec, i, engines if units else 0, streaming=i < streaming) for i in range(engines)]
        agents = {seat.name: Agent(around, coordinator, spec, seat, content) for seat in seats}
        shared = list(agents.values())[: (engines + 1) // 2] if lends else []
        super().__init__(spec, agents, shared)
        self.trainers: list[Trainer] = []
        """Those that were not fenced."""
        self._trainers_made = 0

    def _seat(self, spec: ModelSpec, index: int, in_units: int, *, streaming: bool) -> Seat:
        name = f"{spec.prefix}e{index}"
        grouped = spec.prefix == "" and bool(self._around.policy.min_engines)
        group = GROUPS[index % len(GROUPS)] if grouped else ""
        paired = index // UNIT_SIZE < min(in_units // UNIT_SIZE, MAX_UNITS)
        unit = f"pair{index // UNIT_SIZE}" if paired else ""  # of the model: others have units of that name too
        return Seat(name, (f"gpu-{name}",), group, unit, UNIT_SIZE if paired else 0, streaming)

    @property
    def served(self) -> tuple[WeightVersion, ...]:
        return self._coordinator.core.model(self.spec.name).served

    # ---- trainers ----

    def new_trainer(self, *, takeover: bool = False) -> Trainer:
        name = f"{self.spec.prefix}t{self._trainers_made}"
        trainer = Trainer(self._around, self._coordinator, self, name, takeover=takeover)
        self._trainers_made += 1
        self.trainers.append(trainer)
        trainer.on_death = lambda: self._trainer_died(trainer)
        trainer.start()
        return trainer

    def _trainer_died(self, trainer: Trainer) -> None:
        """One that was fenced stays away; when none is left somebody starts a new one."""
        if not trainer.fenced:
            if self._around.supervisor.launches:
                self._around.supervisor.restart(trainer)
            return
        self.trainers.remove(trainer)
        if not self.trainers:
            self.new_trainer(takeover=self._around.kernel.rng.random() < 0.5)

    # ---- how it is ----

    def well(self, above: int = 0) -> bool:
        """Every engine serves what it is to serve, and is routed to: a version above that number, or one that it stays
        at."""
        if not self._coordinator.up or not self.agents:
            return False
        if not self.spec.frozen:
            if not self._moves:
                return True
            if not self.served or max(self.served).number <= above:
                return False
        return all(self._is_lit(a) or self._is_out_of_reach(a) for a in self.agents.values())

    @property
    def _moves(self) -> bool:
        """Enough engines go with the fleet for a push; else it stands still until somebody is released."""
        stays, groups = self._coordinator.ledger.kept.stays, Counter[str]()
        goes = [a for a in self.agents.values() if a.engine_id not in stays or a.seat.unit]
        groups.update(a.seat.group for a in goes)
        own = {a.seat.group for a in self.agents.values()}
        return bool(goes) and all(groups[g] >= n for g, n in self._around.policy.min_engines.items() if g in own)

    def _is_lit(self, agent: Agent) -> bool:
        """It serves what it is to serve, and is routed to."""
        core, kept = self._coordinator.core, self._coordinator.ledger.kept.stays.get(agent.engine_id)
        if kept is not None and not agent.seat.unit and agent.present.core.state.applied != kept.version:
            return False
        known = agent.up and agent.name in core.engines
        return known and agent.present.open and core.routable(core.engines[agent.engine_id])

    def _is_out_of_reach(self, agent: Agent) -> bool:
        """It is to stay at a version that nobody can bring to it: its files are gone, or this life went past it."""
        kept, state = self._coordinator.ledger.kept.stays.get(agent.engine_id), agent.present.core.state
        if kept is None or not agent.up:
            return False
        known = self._coordinator.core.model(self.spec.name).checkpoints.get(kept.version.number)
        written = None if known is None else self._around.shelf.get(known.name)
        lies_there = written is not None and digest_of(written.content) == kept.content_digest
        past = state.applied is not None and state.applied.number > kept.version.number
        return not lies_there or past

    def describe(self) -> str:
        core = self._coordinator.core
        engines = ", ".join(f"{a.name} {a.present.describe() if a.up else 'down'}" for a in self.agents.values())
        updates = [u for u in core.updates.values() if u.model == self.spec.name]
        said = [f"{u.update_id} {u.phase.value} {u.cause}" for u in updates][-3:]
        trainers = [f"{t.name} term {t.term} up {t.up}" for t in self.trainers]
        served = list(map(str, self.served))
        term = core.model(self.spec.name).term
        return f"{self.spec.name} serves {served}, term {term}; {engines}; {said}; {trainers}"
