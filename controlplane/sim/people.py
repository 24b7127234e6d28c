"""Operators: they pause, drain, put to sleep, wake and roll back, at any time, twice, or for a life that is gone.

They look at the fleet now and then, and at last end what still stands in their names. They also wake engines that
sleep for a trainer that was fenced: its launcher never starts it again, and nobody but the owner ends that hold, so a
person who knows that its processes are gone says its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core import fleet_events as fe
from controlplane.core.engine_state import HoldKind
from controlplane.core.names import trainer_owner
from controlplane.core.versions import Incarnation
from controlplane.sim.calls import Call
from controlplane.sim.kernel import Action, Process, connect

if TYPE_CHECKING:
    from controlplane.sim.agent import Agent, Command, Life
    from controlplane.sim.team import Team
    from controlplane.sim.world import World

NAMES = ("ann", "bob")
HOLD_SECONDS = (0.2, 3.0)
LOOK_SECONDS = 1.0
LOOK_CHANCE = 0.3
"""Until they tidy up, people look seldom."""
TWICE_CHANCE = 0.2
STALE_CHANCE = 0.3
RETRIES = 3


class People(Process):
    """All operators of a world."""

    def __init__(self, world: World) -> None:
        super().__init__(world.kernel, "people")
        self.world = world
        self.tidy = False
        """They end what stands in their own names."""
        self._requests = 0

    def boot(self) -> None:
        self.after(LOOK_SECONDS, self._look)

    # ---- holds ----

    def pause_engine(self, agent: Agent) -> None:
        self._hold_for_a_while(agent, HoldKind.OPERATOR)

    def drain(self, agent: Agent) -> None:
        self._hold_for_a_while(agent, HoldKind.DRAINING)

    def _hold_for_a_while(self, agent: Agent, kind: HoldKind) -> None:
        owner = self._name()
        self._while(agent, _hold(kind, owner, present=True), _hold(kind, owner, present=False))

    def sleep(self, agent: Agent) -> None:
        """At either level; by two people at once now and then, so that one wakes what the other put to sleep."""
        rng, owner = self.kernel.rng, self._name()
        self._while(agent, _sleep(owner, rng.choice((1, 2))), _wake(owner, kv=True))
        if rng.random() < STALE_CHANCE:  # a wake in two steps, and sometimes asleep again between them
            self._while(agent, _wake(owner, kv=False), _sleep(owner, rng.choice((1, 2))))
        if rng.random() < STALE_CHANCE:
            self._while(agent, _sleep(self._name(), rng.choice((1, 2))), _wake(owner, kv=rng.random() < 0.5))

    def _while(self, agent: Agent, begin: Command, end: Command) -> None:
        """Both for the life that the engine has now, wherever it is by then."""
        rng, incarnation = self.kernel.rng, agent.present.core.state.incarnation
        self.call(agent, incarnation, begin)
        if rng.random() < STALE_CHANCE:  # an end of what did not begin yet, or of somebody else's
            self.call(agent, incarnation, end)
        seconds = rng.uniform(*HOLD_SECONDS)
        self.after(seconds, lambda: self.call(agent, incarnation, end))
        if rng.random() < TWICE_CHANCE:
            self.after(0.5 * seconds, lambda: self.call(agent, incarnation, begin))
            self.after(seconds, lambda: self.call(agent, incarnation, end))

    def call(self, agent: Agent, incarnation: Incarnation, act: Command, retries: int = RETRIES) -> None:
        def failed(error: e.WeightplaneError) -> None:
            if isinstance(error, (e.PeerLost, e.UpdateInProgress)) and retries:
                self.after(0.3, lambda: self.call(agent, incarnation, act, retries - 1))

        Call(self, agent, incarnation, act).begin(lambda: None, failed)

    def _name(self) -> str:
        return self.kernel.rng.choice(NAMES)

    # ---- looking ----

    def _look(self) -> None:
        self.after(LOOK_SECONDS, self._look)
        if not self.tidy and self.kernel.rng.random() > LOOK_CHANCE:
            return
        for team in self.world.teams.values():
            there = {trainer_owner(t.name) for t in team.trainers}
            for agent in team.agents.values():
                if agent.up and not agent.paused:
                    self._end_what_stands(agent, there)

    def _end_what_stands(self, agent: Agent, trainers: set[str]) -> None:
        state = agent.present.core.state
        for hold in sorted(state.holds, key=str):
            mine = hold.owner in NAMES and self.tidy
            gone = hold.owner not in NAMES and hold.owner not in trainers
            if hold.kind is HoldKind.ASLEEP and (mine or gone):
                self.call(agent, state.incarnation, _wake(hold.owner, kv=True))
            elif hold.kind in (HoldKind.OPERATOR, HoldKind.DRAINING) and mine:
                self.call(agent, state.incarnation, _hold(hold.kind, hold.owner, present=False))

    # ---- rollbacks ----

    def roll_back(self, team: Team, number: int | None = None, *, twice: bool = False) -> None:
        """To a version that is known, or was; a request that is not answered may come twice."""
        known = list(self.world.coordinator.core.model(team.spec.name).checkpoints)
        self._requests += 1
        request_id = f"{self._name()}:{self._requests}"
        chosen = number if number is not None else self.kernel.rng.choice([*known, 0])
        self._ask(team, request_id, chosen)
        if twice:
            self._ask(team, request_id, chosen)

    def _ask(self, team: Team, request_id: str, number: int) -> None:
        coordinator = self.world.coordinator
        stream = connect(self, coordinator)
        if stream is not None:
            run, model, update_id = self.world.settings.run_id, team.spec.name, coordinator.new_update_id()
            event = fe.RollbackRequested(update_id, request_id, run, model, number)
            stream.to_server(lambda: coordinator.begin(stream, event, lambda begun: None))


def _hold(kind: HoldKind, owner: str, *, present: bool) -> Command:
    def act(life: Life, told: Action) -> None:
        life.hold(kind, owner, present=present)
        told()

    return act


def _sleep(owner: str, level: int) -> Command:
    return lambda life, told: life.work.sleep(ee.SleepRequested(owner, level), told)


def _wake(owner: str, *, kv: bool) -> Command:
    return lambda life, told: life.work.wake(ee.WakeRequested(owner, kv), told)
