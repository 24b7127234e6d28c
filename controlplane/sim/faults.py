"""What goes wrong, and when: by chance from the world's one source, or as a scenario arms it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from controlplane.core import engine_events as ee
from controlplane.core.engine_state import Held
from controlplane.sim.engine import InstallEnding
from controlplane.sim.kernel import Crashed, Process

if TYPE_CHECKING:
    from controlplane.sim.agent import Agent
    from controlplane.sim.world import World

POINTS = (
    "coordinator.before_sync",
    "coordinator.after_save",
    "engine.before_sync",
    "engine.after_open",
    "engine.between_chunks",
    "engine.before_install",
    "engine.mid_install",
    "engine.after_install",
    "engine.after_report",
    "trainer.after_begin",
    "trainer.before_open",
    "trainer.between_chunks",
    "trainer.before_commit",
    "trainer.after_commit",
)
"""Where a process may die or stop."""

TROUBLED = tuple(ending for ending in InstallEnding if ending is not InstallEnding.WORKS)
PAUSE_SECONDS = (0.2, 6.0)
PARTITION_SECONDS = (0.5, 5.0)
HOLD_SECONDS = (0.2, 3.0)
MAX_TRAINERS = 3


class Faults:
    """Off until `on` is set; what a scenario armed happens all the same."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.on = False
        self._rng = world.kernel.rng
        self._armed: dict[tuple[str, str], str] = {}
        self._endings: dict[str, deque[InstallEnding]] = {}

    # ---- as a scenario says ----

    def arm(self, point: str, process: str, action: str = "crash") -> None:
        """When that process passes the point next: "crash", "pause" or "cut" (all its streams)."""
        self._armed[(point, process)] = action

    def next_installs(self, engine: str, *endings: InstallEnding) -> None:
        self._endings.setdefault(engine, deque()).extend(endings)

    # ---- where processes ask ----

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

    def spans_disagree(self) -> bool:
        """Whether a border shows that tokens were counted wrongly."""
        return self.on and self._rng.random() < self.world.settings.spans_trouble

    # ---- by chance ----

    def start(self) -> None:
        self.on = True
        self._next_trouble()

    def stop(self) -> None:
        """No new trouble; what is stopped goes on, what is apart comes together, holds end."""
        self.on = False
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
        if len(self.world.trainers) < MAX_TRAINERS:
            self.world.new_trainer(takeover=self._rng.random() < 0.7)

    def _operate(self) -> None:
        """A pause, and later its resume: for that incarnation, wherever it is by then."""
        agent = self._agent()
        if agent is None:
            return
        incarnation, owner = agent.present.core.state.incarnation, self._rng.choice(("ann", "bob"))
        agent.present.hold(owner, incarnation, present=True)
        end = self._rng.uniform(*HOLD_SECONDS)
        self.world.supervisor.after(end, lambda: self._end_hold(agent, owner))
        self.world.supervisor.after(end, lambda: agent.present.hold(owner, incarnation, present=False))

    def _end_hold(self, agent: Agent, owner: str) -> None:
        """A resume that nobody paused: stale, doubled, or in mid-install."""
        if agent.up and agent.present.running and self._rng.random() < 0.3:
            agent.present.hold(owner, agent.present.core.state.incarnation, present=False)

    def _rogue(self) -> None:
        self.world.rogue.act()

    def _spans(self) -> None:
        """A sample that ends shows it too, at any time."""
        agent = self._agent()
        if agent is not None and isinstance(agent.present.core.state.weights, Held):
            agent.present.apply(ee.SpansDisagreed("the engine says otherwise"))

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
    "operator": Faults._operate,
    "rogue": Faults._rogue,
    "spans disagree": Faults._spans,
    "open twice": Faults._open_twice,
    "leave": Faults._leave,
}
