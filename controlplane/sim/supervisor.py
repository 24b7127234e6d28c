"""What starts processes again, and never fails itself: it stands for launchers, networks and fate."""

from __future__ import annotations

from controlplane.sim.kernel import Process

RESTART_SECONDS = (0.1, 3.0)


class Supervisor(Process):
    """Of everything in one world."""

    launches = True
    """Trainers that die are started again."""

    def boot(self) -> None:
        pass

    def restart(self, process: Process) -> None:
        """What launchers do."""
        self.after(self.kernel.rng.uniform(*RESTART_SECONDS), process.start)
