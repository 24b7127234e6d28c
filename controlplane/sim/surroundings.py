"""What every process of a world finds there."""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.core.update_policy import UpdatePolicy
from controlplane.sim.coverage import Coverage
from controlplane.sim.faults import Faults
from controlplane.sim.kernel import Kernel
from controlplane.sim.settings import SimSettings
from controlplane.sim.shelf import Shelf
from controlplane.sim.supervisor import Supervisor
from controlplane.sim.witness import Witness


@dataclass
class Surroundings:
    """Time, fate, launchers, who looks on, and where checkpoints lie; nobody whom it could talk to."""

    kernel: Kernel
    settings: SimSettings
    policy: UpdatePolicy
    """What an update needs."""
    coverage: Coverage
    witness: Witness
    supervisor: Supervisor
    faults: Faults
    shelf: Shelf
    last_content: int = 1000

    def next_content(self) -> int:
        """Weights that no version had before."""
        self.last_content += 1
        return self.last_content
