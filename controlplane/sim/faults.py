"""What goes wrong where a process asks: by chance from the world's one source, or as a scenario arms it."""

from __future__ import annotations

from collections import deque

from controlplane.core import errors as e
from controlplane.sim.coverage import Coverage
from controlplane.sim.engine import InstallEnding
from controlplane.sim.kernel import Crashed, Kernel, Process
from controlplane.sim.settings import SimSettings

POINTS = (
    "coordinator.before_sync",
    "coordinator.after_save",
    "coordinator.before_carry",
    "coordinator.before_carry_commit",
    "engine.before_sync",
    "engine.after_open",
    "engine.between_chunks",
    "engine.mid_read",
    "engine.before_install",
    "engine.mid_install",
    "engine.mid_streaming",
    "engine.after_install",
    "engine.mid_sleep",
    "engine.mid_wake",
    "engine.after_report",
    "trainer.after_begin",
    "trainer.before_open",
    "trainer.between_chunks",
    "trainer.before_commit",
    "trainer.after_commit",
    "trainer.before_sleep",
    "trainer.before_wake",
    "trainer.before_publish",
)
"""Where a process may die or stop."""

TROUBLED = tuple(ending for ending in InstallEnding if ending is not InstallEnding.WORKS)
PAUSE_SECONDS = (0.2, 6.0)


class Faults:
    """Off until `on` is set; what a scenario armed happens all the same."""

    def __init__(self, kernel: Kernel, settings: SimSettings, coverage: Coverage, supervisor: Process) -> None:
        self.on = False
        self._rng = kernel.rng
        self._settings = settings
        self._coverage = coverage
        self._supervisor = supervisor
        self._armed: dict[tuple[str, str], str] = {}
        self._endings: dict[str, deque[InstallEnding]] = {}
        self._slow_checks: dict[str, float] = {}
        self._slow_installs: dict[str, float] = {}
        self._ledger_fails = False

    # ---- as a scenario says ----

    def arm(self, point: str, process: str, action: str = "crash") -> None:
        """When that process passes the point next: "crash", "pause" or "cut" (all its streams)."""
        self._armed[(point, process)] = action

    def next_installs(self, engine: str, *endings: InstallEnding) -> None:
        self._endings.setdefault(engine, deque()).extend(endings)

    def slow_checks(self, engine: str, seconds: float) -> None:
        """Each check of a chunk takes so much longer on that engine, until 0 is said."""
        self._slow_checks[engine] = seconds

    def slow_installs(self, engine: str, seconds: float) -> None:
        """Each install takes so much longer on that engine, until 0 is said."""
        self._slow_installs[engine] = seconds

    def fail_the_ledger(self) -> None:
        """The next record cannot be written."""
        self._ledger_fails = True

    # ---- where processes ask ----

    def writing(self, coordinator: Process) -> None:
        """A record is written, and not yet synced."""
        self.point(coordinator, "coordinator.before_sync")
        if self._ledger_fails:
            self._ledger_fails = False
            raise e.LedgerError(path="the disk", cause="no space is left")

    def point(self, process: Process, name: str) -> None:
        """A named point is passed. Raises Crashed if the process dies there."""
        action = self._armed.pop((name, process.name), None)
        if action is None and self.on and self._rng.random() < self._settings.point_chance:
            action = self._rng.choice(("crash", "crash", "pause"))
        if action is None:
            return
        self._coverage.points[name] += 1
        if action == "crash":
            process.crash()
            raise Crashed
        if action == "cut":
            for stream in list(process.streams):
                stream.cut()
        else:
            self.pause(process)

    def install_ending(self, engine: str) -> InstallEnding:
        forced = self._endings.get(engine)
        if forced:
            return forced.popleft()
        if self.on and self._rng.random() < self._settings.install_trouble:
            return self._rng.choice(TROUBLED)
        return InstallEnding.WORKS

    def slow_check(self, engine: str) -> float:
        return self._slow_checks.get(engine, 0.0)

    def slow_install(self, engine: str) -> float:
        return self._slow_installs.get(engine, 0.0)

    def engine_fails(self) -> bool:
        """Whether an engine neither starts, sleeps nor wakes, as it was asked to."""
        return self.on and self._rng.random() < self._settings.sleep_trouble

    def spans_disagree(self) -> bool:
        """Whether a border shows that tokens were counted wrongly."""
        return self.on and self._rng.random() < self._settings.spans_trouble

    # ---- off and on ----

    def stop(self) -> None:
        """Nothing more goes wrong by chance, and the ledger can be written."""
        self.on = self._ledger_fails = False

    def pause(self, process: Process) -> None:
        process.pause()
        life = process.life
        seconds = self._rng.uniform(*PAUSE_SECONDS)
        self._supervisor.after(seconds, lambda: process.resume() if process.life == life else None)
