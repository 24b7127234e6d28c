"""A trainer's process, as far as its devices, its pushes and its checkpoints know it."""

from __future__ import annotations

from controlplane.core import fleet_events as fe
from controlplane.core.versions import EngineId, Incarnation, Term
from controlplane.sim.coordinator import Coordinator
from controlplane.sim.kernel import Crashed, Process
from controlplane.sim.roster import Roster
from controlplane.sim.surroundings import Surroundings


class Leaseholder(Process):
    """Its name, its term and how far it is; `fence` ends it."""

    def __init__(self, around: Surroundings, coordinator: Coordinator, team: Roster, name: str) -> None:
        super().__init__(around.kernel, name)
        self.around = around
        self.coordinator = coordinator
        self.team = team
        self.model = team.spec.name
        self.fenced = False
        self.lives = 0
        self.term = Term(0)
        self.step = 0
        self.broken: dict[tuple[EngineId, Incarnation], fe.Avoided] = {}
        """Links that broke in this life."""

    @property
    def incarnation(self) -> Incarnation:
        return Incarnation(f"{self.name}/{self.lives}")

    def fence(self) -> None:
        """STALE_TERM: the process ends, and no launcher starts it again."""
        self.fenced = True
        self.crash()
        raise Crashed
