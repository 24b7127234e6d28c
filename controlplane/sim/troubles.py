"""What goes wrong by chance: from time to time something is done to somebody of the cast.

What happens where a process asks for it is `faults`; this turns that on too.
"""

from __future__ import annotations

from controlplane.core.engine_state import Held
from controlplane.sim.agent import Agent
from controlplane.sim.cast import Cast
from controlplane.sim.kernel import Process
from controlplane.sim.people import People
from controlplane.sim.rogue import Rogue
from controlplane.sim.shelf import Written
from controlplane.sim.surroundings import Surroundings

STALL_SECONDS = (0.2, 4.0)
PARTITION_SECONDS = (0.5, 5.0)
MAX_TRAINERS = 3
"""Of one model, at once."""
WRONG_CONTENT = 998
"""What lies in a checkpoint that somebody wrote over."""


class Troubles:
    """None until `start`, none after `stop`."""

    def __init__(self, around: Surroundings, cast: Cast, people: People, rogue: Rogue) -> None:
        self._around = around
        self._cast = cast
        self._people = people
        self._rogue = rogue
        self._rng = around.kernel.rng

    def start(self) -> None:
        self._around.faults.on = True
        for team in self._cast.teams.values():
            team.borrows = True
        self._next_trouble()

    def stop(self) -> None:
        """No new trouble; what is stopped goes on, what is apart comes together, people end their holds."""
        self._around.faults.stop()
        self._people.tidy = True
        for team in self._cast.teams.values():
            team.borrows = False
        self._around.kernel.heal_all()
        for process in self._cast.processes():
            process.resume()

    def _next_trouble(self) -> None:
        wait = self._rng.expovariate(1.0 / self._around.settings.trouble_every)
        self._around.supervisor.after(wait, self._trouble)

    def _trouble(self) -> None:
        if not self._around.faults.on:
            return
        self._next_trouble()
        for kind, chance in self._around.settings.chances.items():
            if self._rng.random() < chance:
                _KINDS[kind](self)

    def _any(self) -> Process:
        return self._rng.choice(self._cast.processes())

    def _agent(self) -> Agent | None:
        """One whose engine runs, and which is not stopped itself."""
        agent = self._rng.choice(list(self._cast.agents.values()))
        return agent if agent.up and not agent.paused and agent.present.running else None

    def _break_stream(self) -> None:
        streams = list(self._any().streams)
        if streams:
            self._rng.choice(streams).cut()

    def _crash_agent(self) -> None:
        self._crash(self._rng.choice(list(self._cast.agents.values())))

    def _crash_coordinator(self) -> None:
        self._crash(self._cast.coordinator)

    def _crash_trainer(self) -> None:
        if self._cast.trainers:
            self._crash(self._rng.choice(self._cast.trainers))

    def _crash(self, process: Process) -> None:
        if process.up:
            process.crash()

    def _pause_one(self) -> None:
        process = self._any()
        if process.up and not process.paused:
            self._around.faults.pause(process)

    def _partition(self) -> None:
        a, b = self._any(), self._any()
        if a is not b:
            self._around.kernel.part(a, b)
            self._around.supervisor.after(self._rng.uniform(*PARTITION_SECONDS), lambda: self._around.kernel.heal(a, b))

    def _kill_engine(self) -> None:
        agent = self._agent()
        if agent is not None:
            agent.present.die("killed")

    def _take_over(self) -> None:
        team = self._rng.choice([t for t in self._cast.teams.values() if not t.spec.frozen])
        if len(team.trainers) < MAX_TRAINERS:
            team.new_trainer(takeover=self._rng.random() < 0.7)

    def _pause_engine(self) -> None:
        agent = self._agent()
        if agent is not None:
            self._people.pause_engine(agent)

    def _stall(self) -> None:
        agent = self._agent()
        if agent is not None:
            agent.present.work.stall(self._rng.uniform(*STALL_SECONDS))

    def _sleep(self) -> None:
        agent = self._agent()
        if agent is not None:
            self._people.sleep(agent)

    def _drain(self) -> None:
        agent = self._agent()
        if agent is not None:
            self._people.drain(agent)

    def _roll_back(self) -> None:
        team = self._rng.choice(list(self._cast.teams.values()))
        self._people.roll_back(team, twice=self._rng.random() < 0.3)

    def _keep(self) -> None:
        self._people.keep(self._rng.choice(list(self._cast.teams.values())))

    def _lose_a_checkpoint(self) -> None:
        """Deleted, or written over, and nobody is told."""
        names = self._around.shelf.names()
        if not names:
            return
        name = self._rng.choice(names)
        written = self._around.shelf.get(name)
        assert written is not None
        self._around.shelf.remove(name)
        if self._rng.random() < 0.3:
            self._around.shelf.put(name, Written(written.layout, WRONG_CONTENT))

    def _wrong_words(self) -> None:
        self._rogue.act()

    def _spans(self) -> None:
        """A sample that ends shows it too, at any time."""
        agent = self._agent()
        if agent is not None and (isinstance(agent.present.core.state.weights, Held) or agent.present.requests.some):
            agent.present.requests.disagree()

    def _open_twice(self) -> None:
        """A trainer opens the same update on an engine once more, while the first stream goes on by itself."""
        pushes = [t.push for t in self._cast.trainers if t.up and not t.paused and t.push is not None]
        feeds = [f for p in pushes if not p.over for f in p.feeds]
        if feeds:
            self._rng.choice(feeds).again()

    def _leave(self) -> None:
        agent = self._agent()
        if agent is not None:
            agent.present.leave()

    def _fail_the_ledger(self) -> None:
        self._around.faults.fail_the_ledger()


_KINDS = {
    "break a stream": Troubles._break_stream,
    "crash an agent": Troubles._crash_agent,
    "crash the coordinator": Troubles._crash_coordinator,
    "crash a trainer": Troubles._crash_trainer,
    "pause a process": Troubles._pause_one,
    "partition": Troubles._partition,
    "kill an engine": Troubles._kill_engine,
    "take over": Troubles._take_over,
    "pause an engine": Troubles._pause_engine,
    "stall": Troubles._stall,
    "sleep": Troubles._sleep,
    "drain": Troubles._drain,
    "roll back": Troubles._roll_back,
    "keep": Troubles._keep,
    "lose a checkpoint": Troubles._lose_a_checkpoint,
    "rogue": Troubles._wrong_words,
    "spans disagree": Troubles._spans,
    "open twice": Troubles._open_twice,
    "leave": Troubles._leave,
    "fail the ledger": Troubles._fail_the_ledger,
}
