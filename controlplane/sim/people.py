"""Operators: they pause, drain, put to sleep, wake, keep engines at versions and roll back, at any time, twice, or for
a life that is gone.

They look at the fleet now and then, and at last end what still stands in their names. They also wake engines that
sleep for a trainer that was fenced, or waits in vain for a lease: nobody but the owner ends that hold, so a
person who knows that its processes are gone says its name.
"""

from __future__ import annotations

from collections.abc import Callable

from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core import fleet_events as fe
from controlplane.core.engine_state import HoldKind
from controlplane.core.names import trainer_owner
from controlplane.core.pauses import PauseMode, PausePolicy
from controlplane.core.versions import EngineId, Incarnation
from controlplane.sim.agent import Agent, Command, EngineLife
from controlplane.sim.calls import Call
from controlplane.sim.cast import Cast
from controlplane.sim.kernel import Action, Process, connect
from controlplane.sim.surroundings import Surroundings
from controlplane.sim.team import Team

NAMES = ("ann", "bob")
HOLD_SECONDS = (0.2, 3.0)
LOOK_SECONDS = 1.0
LOOK_CHANCE = 0.3
"""Until they tidy up, people look seldom."""
TWICE_CHANCE = 0.2
STALE_CHANCE = 0.3
RETRIES = 3
FALLBACKS = (PauseMode.KEEP, PauseMode.ABORT)
RESUMED = (HoldKind.OPERATOR, HoldKind.FINISHING, HoldKind.DRAINING)
"""What ends with its owner's resume."""
KEEP_SECONDS = (1.0, 8.0)
KEEP_RETRY_SECONDS = 0.1
KEEP_RETRIES = 20
"""An engine in the middle of an update is kept after it."""


class People(Process):
    """All operators of a world."""

    def __init__(self, around: Surroundings, cast: Cast) -> None:
        super().__init__(around.kernel, "people")
        self._around = around
        self._cast = cast
        self.tidy = False
        """They end what stands in their own names."""
        self.releases = False
        """They release every engine that stays at a version."""
        self._requests = 0

    def boot(self) -> None:
        self.after(LOOK_SECONDS, self._look)

    # ---- holds ----

    def pause_engine(self, agent: Agent) -> None:
        """In each of its modes; resumed now and then while requests are waited for."""
        rng, owner = self.kernel.rng, self._name()
        how = PausePolicy(rng.choice(list(PauseMode)), rng.uniform(0.0, 2.0), rng.choice(FALLBACKS))
        self._while(agent, lambda life, told: life.work.pause(owner, how, told), _resume(owner))

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
        for engine_id in list(self._cast.coordinator.ledger.kept.stays) if self.releases else ():
            self._release(engine_id)
        for team in self._cast.teams.values():
            there = {trainer_owner(t.name) for t in team.trainers if t.term or not t.up}
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
            elif hold.kind in RESUMED and mine:
                self.call(agent, state.incarnation, _hold(hold.kind, hold.owner, present=False))

    # ---- engines that stay at a version ----

    def keep(self, team: Team) -> None:
        """At something that may be possible, for a while or until it is tidied up; now and then for an engine that is
        not there, or twice."""
        rng, agent = self.kernel.rng, self.kernel.rng.choice(list(team.agents.values()))
        known = self._cast.coordinator.core.model(team.spec.name)
        applied = agent.present.core.state.applied
        numbers = [*known.checkpoints, *([applied.number] if applied else [0])]
        for _ in range(2 if rng.random() < TWICE_CHANCE else 1):
            self.keep_at(agent, rng.choice(numbers))
        if rng.random() < 0.5:
            self.after(rng.uniform(*KEEP_SECONDS), lambda: self._release(agent.engine_id))

    def keep_at(self, agent: Agent, number: int, retries: int = KEEP_RETRIES) -> None:
        """Until it is answered, a few times."""
        run, model = self._around.settings.run_id, agent.spec.name

        def failed(error: e.WeightplaneError) -> None:
            if isinstance(error, (e.PeerLost, e.UpdateInProgress, e.CoordinatorRecovering)) and retries:
                self.after(KEEP_RETRY_SECONDS, lambda: self.keep_at(agent, number, retries - 1))

        self._tell(fe.KeepRequested(run, agent.engine_id, model, number), failed)

    def _release(self, engine_id: EngineId) -> None:
        self._tell(fe.ReleaseRequested(self._around.settings.run_id, engine_id), lambda error: None)

    def _tell(
        self, event: fe.KeepRequested | fe.ReleaseRequested, failed: Callable[[e.WeightplaneError], None]
    ) -> None:
        coordinator = self._cast.coordinator
        stream = connect(self, coordinator)
        if stream is not None:
            stream.on_client_end = failed
            stream.to_server(lambda: coordinator.said_once(stream, event, stream.cancel))

    # ---- rollbacks ----

    def roll_back(self, team: Team, number: int | None = None, *, twice: bool = False) -> None:
        """To a version that is known, or was; a request that is not answered may come twice."""
        known = list(self._cast.coordinator.core.model(team.spec.name).checkpoints)
        self._requests += 1
        request_id = f"{self._name()}:{self._requests}"
        chosen = number if number is not None else self.kernel.rng.choice([*known, 0])
        self._ask(team, request_id, chosen)
        if twice:
            self._ask(team, request_id, chosen)

    def _ask(self, team: Team, request_id: str, number: int) -> None:
        coordinator = self._cast.coordinator
        stream = connect(self, coordinator)
        if stream is not None:
            run, model, update_id = self._around.settings.run_id, team.spec.name, coordinator.new_update_id()
            event = fe.RollbackRequested(update_id, request_id, run, model, number)
            stream.to_server(lambda: coordinator.begin(stream, event, lambda begun: None))


def _hold(kind: HoldKind, owner: str, *, present: bool) -> Command:
    def act(life: EngineLife, told: Action) -> None:
        life.hold(kind, owner, present=present)
        told()

    return act


def _resume(owner: str) -> Command:
    def act(life: EngineLife, told: Action) -> None:
        for kind in RESUMED:
            life.hold(kind, owner, present=False)
        told()

    return act


def _sleep(owner: str, level: int) -> Command:
    return lambda life, told: life.work.sleep(ee.SleepRequested(owner, level), told)


def _wake(owner: str, *, kv: bool) -> Command:
    return lambda life, told: life.work.wake(ee.WakeRequested(owner, kv), told)
