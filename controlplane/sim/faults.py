"""What goes wrong, and when: by chance from the world's one source, or as a scenario arms it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from controlplane.core import errors as e
from controlplane.core.engine_state import Held
from controlplane.sim.engine import InstallEnding
from controlplane.sim.kernel import Crashed, Process
from controlplane.sim.shelf import Written

if TYPE_CHECKING:
    from controlplane.sim.agent import Agent, Life
    from controlplane.sim.world import World

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
STALL_SECONDS = (0.2, 4.0)
PARTITION_SECONDS = (0.5, 5.0)
MAX_TRAINERS = 3
"""Of one model, at once."""
WRONG_CONTENT = 998
"""What lies in a checkpoint that somebody wrote over."""


class Faults:
    """Off until `on` is set; what a scenario armed happens all the same."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.on = False
        self._rng = world.kernel.rng
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
        if action is None and self.on and self._rng.random() < self.world.settings.point_chance:
            action = self._rng.choice(("crash", "crash", "pause"))
        if action is None:
            return
        self.world.coverage.points[name] += 1
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
        if self.on and self._rng.random() < self.world.settings.install_trouble:
            return self._rng.choice(TROUBLED)
        return InstallEnding.WORKS

    def slow_check(self, life: Life) -> float:
        return self._slow_checks.get(life.agent.name, 0.0)

    def slow_install(self, life: Life) -> float:
        return self._slow_installs.get(life.agent.name, 0.0)

    def engine_fails(self) -> bool:
        """Whether an engine neither starts, sleeps nor wakes, as it was asked to."""
        return self.on and self._rng.random() < self.world.settings.sleep_trouble

    def spans_disagree(self) -> bool:
        """Whether a border shows that tokens were counted wrongly."""
        return self.on and self._rng.random() < self.world.settings.spans_trouble

    # ---- by chance ----

    def start(self) -> None:
        self.on = True
        for team in self.world.teams.values():
            team.borrows = True
        self._next_trouble()

    def stop(self) -> None:
        """No new trouble; what is stopped goes on, what is apart comes together, people end their holds."""
        self.on = self._ledger_fails = False
        self.world.people.tidy = True
        for team in self.world.teams.values():
            team.borrows = False
        self.world.kernel.heal_all()
        for process in self.world.processes():
            process.resume()

    def _next_trouble(self) -> None:
        wait = self._rng.expovariate(1.0 / self.world.settings.trouble_every)
        self.world.supervisor.after(wait, self._trouble)

    def _trouble(self) -> None:
        if not self.on:
            return
        self._next_trouble()
        for kind, chance in self.world.settings.chances.items():
            if self._rng.random() < chance:
                _KINDS[kind](self)

    def pause(self, process: Process) -> None:
        process.pause()
        life = process.life
        seconds = self._rng.uniform(*PAUSE_SECONDS)
        self.world.supervisor.after(seconds, lambda: process.resume() if process.life == life else None)

    def _any(self) -> Process:
        return self._rng.choice(self.world.processes())

    def _agent(self) -> Agent | None:
        """One whose engine runs, and which is not stopped itself."""
        agent = self._rng.choice(list(self.world.agents.values()))
        return agent if agent.up and not agent.paused and agent.present.running else None

    def _break_stream(self) -> None:
        streams = list(self._any().streams)
        if streams:
            self._rng.choice(streams).cut()

    def _crash_agent(self) -> None:
        self._crash(self._rng.choice(list(self.world.agents.values())))

    def _crash_coordinator(self) -> None:
        self._crash(self.world.coordinator)

    def _crash_trainer(self) -> None:
        if self.world.trainers:
            self._crash(self._rng.choice(self.world.trainers))

    def _crash(self, process: Process) -> None:
        if process.up:
            process.crash()

    def _pause_one(self) -> None:
        process = self._any()
        if process.up and not process.paused:
            self.pause(process)

    def _partition(self) -> None:
        a, b = self._any(), self._any()
        if a is not b:
            self.world.kernel.part(a, b)
            self.world.supervisor.after(self._rng.uniform(*PARTITION_SECONDS), lambda: self.world.kernel.heal(a, b))

    def _kill_engine(self) -> None:
        agent = self._agent()
        if agent is not None:
            agent.present.die("killed")

    def _take_over(self) -> None:
        team = self._rng.choice([t for t in self.world.teams.values() if not t.spec.frozen])
        if len(team.trainers) < MAX_TRAINERS:
            team.new_trainer(takeover=self._rng.random() < 0.7)

    def _pause_engine(self) -> None:
        agent = self._agent()
        if agent is not None:
            self.world.people.pause_engine(agent)

    def _stall(self) -> None:
        agent = self._agent()
        if agent is not None:
            agent.present.work.stall(self._rng.uniform(*STALL_SECONDS))

    def _sleep(self) -> None:
        agent = self._agent()
        if agent is not None:
            self.world.people.sleep(agent)

    def _drain(self) -> None:
        agent = self._agent()
        if agent is not None:
            self.world.people.drain(agent)

    def _roll_back(self) -> None:
        team = self._rng.choice(list(self.world.teams.values()))
        self.world.people.roll_back(team, twice=self._rng.random() < 0.3)

    def _keep(self) -> None:
        self.world.people.keep(self._rng.choice(list(self.world.teams.values())))

    def _lose_a_checkpoint(self) -> None:
        """Deleted, or written over, and nobody is told."""
        names = self.world.shelf.names()
        if not names:
            return
        name = self._rng.choice(names)
        written = self.world.shelf.get(name)
        assert written is not None
        self.world.shelf.remove(name)
        if self._rng.random() < 0.3:
            self.world.shelf.put(name, Written(written.layout, WRONG_CONTENT))

    def fail_the_ledger(self) -> None:
        """The next record cannot be written."""
        self._ledger_fails = True

    def _rogue(self) -> None:
        self.world.rogue.act()

    def _spans(self) -> None:
        """A sample that ends shows it too, at any time."""
        agent = self._agent()
        if agent is not None and (isinstance(agent.present.core.state.weights, Held) or agent.present.requests.some):
            agent.present.requests.disagree()

    def _open_twice(self) -> None:
        """A trainer opens the same update on an engine once more, while the first stream goes on by itself."""
        pushes = [t.push for t in self.world.trainers if t.up and not t.paused and t.push is not None]
        feeds = [f for p in pushes if not p.over for f in p.feeds]
        if feeds:
            self._rng.choice(feeds).again()

    def _leave(self) -> None:
        agent = self._agent()
        if agent is not None:
            agent.present.leave()


_KINDS = {
    "break a stream": Faults._break_stream,
    "crash an agent": Faults._crash_agent,
    "crash the coordinator": Faults._crash_coordinator,
    "crash a trainer": Faults._crash_trainer,
    "pause a process": Faults._pause_one,
    "partition": Faults._partition,
    "kill an engine": Faults._kill_engine,
    "take over": Faults._take_over,
    "pause an engine": Faults._pause_engine,
    "stall": Faults._stall,
    "sleep": Faults._sleep,
    "drain": Faults._drain,
    "roll back": Faults._roll_back,
    "keep": Faults._keep,
    "lose a checkpoint": Faults._lose_a_checkpoint,
    "rogue": Faults._rogue,
    "spans disagree": Faults._spans,
    "open twice": Faults._open_twice,
    "leave": Faults._leave,
    "fail the ledger": Faults.fail_the_ledger,
}
