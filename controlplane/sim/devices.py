"""A trainer's way with the devices that it shares with engines: take (they sleep), train, give (they wake).

It tells the coordinator that it holds them before the first engine sleeps, and that it does not after the last one
woke. Calls are lost, doubled and late, so each is repeated until it was answered, and says in which turn it is made;
and in every life, before every push and whenever no engine could take one, it wakes whatever sleeps in its name. What
sleeps for a trainer that has no lease is a person's to wake (`people`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core.names import trainer_owner
from controlplane.core.versions import DeviceTurn, Incarnation
from controlplane.sim.agent import Agent, Command
from controlplane.sim.calls import Call
from controlplane.sim.kernel import Action
from controlplane.sim.leaseholder import Leaseholder

Done = Callable[[Agent], None]
RETRY_SECONDS = (0.1, 0.6)
TRAIN_SECONDS = (0.2, 1.5)
WEIGHTS_SECONDS = 3.0
"""Longest that engines may take to have their weights' memory; else the push goes to those which have it."""
TAKE_SECONDS = 4.0
"""Longest that engines may take to fall asleep; else the trainer gives up."""
NOT_OURS = (e.DevicesTaken, e.ModelFrozen, e.UnsupportedByEngine, e.StaleTerm, e.StaleTurn)
"""Somebody else's to wake, or its own later word's."""
DEEP_SLEEP_CHANCE = 0.5
TWO_STEPS_CHANCE = 0.3


class Devices:
    """Those of one life of a trainer."""

    def __init__(self, trainer: Leaseholder, tell: Action) -> None:
        """`tell`: the coordinator is to hear who holds them now."""
        self.held = False
        self.busy = False
        """Engines are being put to sleep, or woken."""
        self._trainer = trainer
        self._around = trainer.around
        self._tell = tell
        self._round = 0
        self._turns = 0
        self._incarnations: dict[str, Incarnation] = {}

    # ---- take ----

    def take(self, then: Action) -> None:
        """Put the engines to sleep and train; `then` when that is over. Engines that do not sleep end it."""
        self._round += 1
        self.held = self.busy = True
        self._tell()
        asked = self._round
        waiting = {agent.name for agent in self._trainer.team.shared}
        level = 2 if self._around.kernel.rng.random() < DEEP_SLEEP_CHANCE else 1
        event = ee.SleepRequested(trainer_owner(self._trainer.name), level, self._next_turn())

        def asleep(agent: Agent) -> None:
            waiting.discard(agent.name)
            if not waiting and self._round == asked:
                self._round += 1
                self.busy = False
                self._trainer.after(self._around.kernel.rng.uniform(*TRAIN_SECONDS), then)

        for agent in self._trainer.team.shared:
            self._around.faults.point(self._trainer, "trainer.before_sleep")
            self._call(agent, asked, lambda life, told: life.work.sleep(event, told), asleep)
        self._trainer.after(TAKE_SECONDS, lambda: self._give_up(asked, then))

    def _give_up(self, asked: int, then: Action) -> None:
        if self._round == asked:
            self._round += 1
            self.busy = False
            then()

    # ---- push beside them ----

    def weights(self, then: Action) -> None:
        """The weights' memory of what sleeps in its name; `then` when an install has room."""
        self._round += 1
        asked = self._round
        waiting = {agent.name for agent in self._trainer.team.shared}

        def awake(agent: Agent) -> None:
            waiting.discard(agent.name)
            if not waiting and self._round == asked:
                self._round += 1
                then()

        turn = self._next_turn()
        for agent in self._trainer.team.shared:
            self._wake(agent, asked, turn, kv=False, then=awake)
        self._trainer.after(WEIGHTS_SECONDS, lambda: self._go_on(asked, then))

    def _go_on(self, asked: int, then: Action) -> None:
        if self._round == asked:
            self._round += 1
            then()

    # ---- give ----

    def give(self, then: Action) -> None:
        """Wake what sleeps in its name; `then` when all of it is awake."""
        self._round += 1
        asked = self._round
        waiting = {agent.name for agent in self._trainer.team.shared}
        if not waiting:
            then()
            return
        self.busy = True

        def awake(agent: Agent) -> None:
            waiting.discard(agent.name)
            if not waiting and self._round == asked:
                self._round += 1
                self.held = self.busy = False
                self._tell()
                then()

        turn = self._next_turn()
        for agent in self._trainer.team.shared:
            self._around.faults.point(self._trainer, "trainer.before_wake")
            whole = partial(self._wake, asked=asked, turn=turn, kv=True, then=awake)
            if self._around.kernel.rng.random() < TWO_STEPS_CHANCE:
                self._wake(agent, asked, turn, kv=False, then=whole)
            else:
                whole(agent)

    def _next_turn(self) -> DeviceTurn:
        self._turns += 1
        return DeviceTurn(self._trainer.term, self._turns)

    def _wake(self, agent: Agent, asked: int, turn: DeviceTurn, *, kv: bool, then: Done) -> None:
        """An engine that died asleep is given no memory for weights: it starts anew when it is given all."""
        event = ee.WakeRequested(trainer_owner(self._trainer.name), kv, turn)
        others = NOT_OURS if kv else (*NOT_OURS, e.EngineNotReady)
        self._call(agent, asked, lambda life, told: life.work.wake(event, told), then, others)

    # ---- calls ----

    def _call(
        self,
        agent: Agent,
        asked: int,
        act: Command,
        then: Done,
        settled: tuple[type[e.WeightplaneError], ...] = NOT_OURS,
    ) -> None:
        """Repeat it until it is answered, refused with what no repetition changes, or another round began."""
        if self._round != asked:
            return
        known = self._incarnations.get(agent.name, Incarnation("unknown"))

        def failed(error: e.WeightplaneError) -> None:
            if isinstance(error, e.WrongIncarnation):
                self._incarnations[agent.name] = Incarnation(error.expected)
            if isinstance(error, settled):
                then(agent)
                return
            wait = self._around.kernel.rng.uniform(*RETRY_SECONDS)
            self._trainer.after(wait, lambda: self._call(agent, asked, act, then, settled))

        Call(self._trainer, agent, known, act).begin(lambda: then(agent), failed)
