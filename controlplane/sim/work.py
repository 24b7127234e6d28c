"""An engine agent's work on its engine, one piece at a time, as `engine_agent.life`: pauses, sleep and waking here."""

from __future__ import annotations

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as ee
from controlplane.core.engine_sleep import owes_canary
from controlplane.core.engine_state import Hold, HoldKind
from controlplane.core.pauses import PauseMode, PausePolicy
from controlplane.sim.engine import InstallEnding, Turns
from controlplane.sim.installs import Installs, said_by
from controlplane.sim.kernel import Action
from controlplane.sim.life import Life
from controlplane.sim.requests import Requests
from controlplane.sim.scheduler import Scheduler
from controlplane.sim.streaming import StreamingInstalls
from controlplane.sim.surroundings import Surroundings

SLEEP_SECONDS = (0.02, 0.4)


class EngineWork:
    """That of one incarnation."""

    def __init__(self, life: Life, requests: Requests, around: Surroundings) -> None:
        self._life = life
        self._requests = requests
        self._around = around
        self._turns = Turns()
        self.scheduler = Scheduler(life, requests, self._turns, around)
        self.installs = Installs(life, requests, self.scheduler, self._turns, around)
        self.streaming = StreamingInstalls(life, self.installs, self._turns, around)

    @property
    def idle(self) -> bool:
        return self._turns.idle

    # ---- pauses ----

    def pause(self, owner: str, how: PausePolicy, told: Action) -> None:
        """As `life.commands`: with WAIT those that are in finish first, or time is over; then it is held."""
        operator, finishing = Hold(HoldKind.OPERATOR, owner), Hold(HoldKind.FINISHING, owner)

        def hold() -> None:
            if how.mode is PauseMode.WAIT and finishing not in self._life.core.state.holds:
                told()  # its owner resumed meanwhile
                return
            self._life.apply(ee.HoldChanged(operator, True))
            self._life.apply(ee.HoldChanged(finishing, False))
            mode = how.fallback if how.mode is PauseMode.WAIT else how.mode
            self._turns.take(lambda: self._held(operator, abort=mode is PauseMode.ABORT, told=told))

        if how.mode is PauseMode.WAIT:
            self._life.apply(ee.HoldChanged(finishing, True))
            self.scheduler.let_finish(self._around.kernel.now + how.wait_seconds, hold)
        else:
            hold()

    def _held(self, hold: Hold, *, abort: bool, told: Action) -> None:
        if abort and hold in self._life.core.state.holds and self._life.running:
            self.scheduler.stop()
            self._requests.abort_all()
        told()
        self._turns.done()

    def stall(self, seconds: float) -> None:
        """The engine's core answers nothing for so long: its agent holds the gate until it does (INV-10)."""
        hold = Hold(HoldKind.STALLED, self._life.agent.name)
        if self.idle and not self._life.engine.stalled:
            self._life.engine.stalled = True
            self._life.apply(ee.HoldChanged(hold, True))
            self._life.after(seconds, lambda: self._answers(hold))

    def _answers(self, hold: Hold) -> None:
        self._life.engine.stalled = False
        self._life.apply(ee.HoldChanged(hold, False))

    # ---- sleep ----

    def sleep(self, event: ee.SleepRequested, told: Action) -> None:
        """Free the devices; `told` when they are free. Raises the core's refusals."""
        starts = next((x.level for x in self._life.apply(event) if isinstance(x, fx.StartSleep)), None)
        self._turns.take(lambda: self._sleep(starts, told))

    def _sleep(self, level: int | None, told: Action) -> None:
        """None: somebody else's sleep was waited for."""
        if level is None:
            self._over(told)
            return
        self.scheduler.stop()
        self._life.after(self._around.kernel.rng.uniform(*SLEEP_SECONDS), lambda: self._slept(level, told))

    def _slept(self, level: int, told: Action) -> None:
        self._around.faults.point(self._life.agent, "engine.mid_sleep")
        if self._around.faults.engine_fails():
            self._life.die("it does not sleep")
            return
        self._life.engine.sleep(level)
        self._around.witness.check_memory(self._life, at_rest=False)
        self._over(told)

    def wake(self, event: ee.WakeRequested, told: Action) -> None:
        """Take the devices again; `told` when that is done. Raises the core's refusals."""
        self._life.core.heed(event)
        if event.kv:
            self._life.devices_given(event.owner)
        starts = any(isinstance(x, fx.StartWake) for x in self._life.apply(event))
        self._turns.take(lambda: self._wake(event.kv if starts else None, told))

    def _wake(self, kv: bool | None, told: Action) -> None:
        """None: it was awake."""
        if kv is None:
            self._over(told)
            return
        self._life.after(self._around.kernel.rng.uniform(*SLEEP_SECONDS), lambda: self._woke(kv, told))

    def _woke(self, kv: bool, told: Action) -> None:
        self._around.faults.point(self._life.agent, "engine.mid_wake")
        if self._around.faults.engine_fails():
            self._life.die("it does not wake")
            return
        self._life.engine.wake(kv=kv)
        self._life.apply(ee.Woke(kv))
        if owes_canary(self._life.core.state):
            self._life.after(self.installs.some_seconds(0.3), lambda: self._speaks_at_last(told))
        else:
            self._over(told)

    def _speaks_at_last(self, told: Action) -> None:
        if self.installs.owed is InstallEnding.CANARY:
            self._life.apply(ee.Disproven("a logprob is not finite"))
        else:
            self._life.engine.heard = self._life.engine.content
            self._life.apply(ee.Proven(said_by(self.installs.owed)))
        self._over(told)

    def _over(self, told: Action) -> None:
        told()
        self._turns.done()
        self._around.witness.check_memory(self._life, at_rest=self.idle)
