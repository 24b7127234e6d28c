"""An engine agent's work on its engine: installs, sleep, wake and the gate, one at a time, as `engine_agent.life`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core.canary import Canary
from controlplane.core.engine_sleep import owes_canary
from controlplane.core.engine_state import LETS_FINISH, Hold, HoldKind, Poisoned, Residency, Timings
from controlplane.core.engine_state import Life as LifeWord
from controlplane.core.engine_update import Update
from controlplane.core.pauses import KEEP, PauseMode, PausePolicy
from controlplane.sim.engine import InstallEnding, Turns
from controlplane.sim.kernel import Action
from controlplane.sim.streaming import StreamingInstall

if TYPE_CHECKING:
    from controlplane.sim.agent import Life

INSTALL_SECONDS = (0.02, 0.4)
LOOK_SECONDS = 0.05
SLEEP_SECONDS = (0.02, 0.4)
USUAL, STRANGE = -1.0, -2.0
"""What a canary says."""


class EngineWork:
    """That of one incarnation."""

    def __init__(self, life: Life) -> None:
        self.scheduler_runs = True
        self._life = life
        self._world = life.world
        self._engine = life.engine
        self._turns = Turns()
        self._streaming: dict[int, StreamingInstall] = {}
        self._looks = False
        self._owed = InstallEnding.WORKS
        """How the canary that was put off ends."""

    @property
    def idle(self) -> bool:
        return self._turns.idle

    def _some(self, part: float) -> float:
        return part * self._world.kernel.rng.uniform(*INSTALL_SECONDS)

    # ---- installs ----

    def start_install(self, effect: fx.StartInstall) -> None:
        """From here on the agent owns the update."""
        ending = self._world.faults.install_ending(self._life.agent.name)
        self._turns.take(
            lambda: self._life.after(
                self._some(0.1), lambda: self.stand_still(effect.update, lambda: self._quiet(effect, ending))
            )
        )

    def start_streaming(self, effect: fx.StartStreaming) -> StreamingInstall:
        """Only its end opens the gate from here on; until the commit frame its stream may cut it (INV-4)."""
        ending = self._world.faults.install_ending(self._life.agent.name)
        install = self._streaming[effect.stream] = StreamingInstall(self._life, effect, ending)
        self._turns.take(install.begin)
        return install

    def cut(self, stream: int, error: e.WeightplaneError) -> None:
        """The stream of a streaming install ended in its middle."""
        self._streaming[stream].cut(error)

    def stand_still(self, update: Update, then: Action) -> None:
        """Let requests finish where they are waited for, and stop the scheduler; `then` when no forward pass runs any
        more."""
        self._world.faults.point(self._life.agent, "engine.before_install")
        pause = update.pause or KEEP
        waits = pause.wait_seconds if pause.mode is PauseMode.WAIT and self.scheduler_runs else 0.0
        self._let_finish(self._world.kernel.now + waits, lambda: self._stop_for(pause, then))

    def _let_finish(self, until: float, then: Action) -> None:
        """Nobody enters meanwhile. Somebody who keeps the gate shut and lets nobody finish ends the waiting."""
        stops = any(h.kind not in LETS_FINISH | {HoldKind.UPDATING} for h in self._life.core.state.holds)
        if stops or not self._life.requests.some or self._world.kernel.now >= until:
            then()
        else:
            self._life.after(LOOK_SECONDS, lambda: self._let_finish(until, then))

    def _stop_for(self, pause: PausePolicy, then: Action) -> None:
        self._stop_scheduler()
        mode = pause.fallback if pause.mode is PauseMode.WAIT else pause.mode
        if isinstance(self._life.core.state.weights, Poisoned) or mode is PauseMode.ABORT:
            self._life.requests.abort_all()
        self._life.after(self._some(0.5), then)

    def install_seconds(self, part: float) -> float:
        return self._some(part) + self._world.faults.slow_install(self._life)

    def _quiet(self, effect: fx.StartInstall, ending: InstallEnding) -> None:
        stream, update = effect.stream, effect.update
        if self.fails_quieting(stream, update, ending):
            return
        self._life.apply(ee.Quiesced())
        if ending is InstallEnding.UNTOUCHED:
            error = e.InstallFailed(self._life.agent.name, str(update.version), False, "no byte could be read")
            self.failed(stream, error, touched=False)
            return
        self._world.faults.point(self._life.agent, "engine.mid_install")
        self._world.witness.install_begins(self._life)
        self._engine.install_begins()
        self._life.after(self.install_seconds(1.0), lambda: self._loaded(stream, update, ending))

    def fails_quieting(self, stream: int, update: Update, ending: InstallEnding) -> bool:
        """Whether it ended before a byte was touched."""
        if ending is InstallEnding.NOT_QUIET:
            touched = self._life.core.state.weights != update.held_before
            self.failed(stream, e.DeadlineExceeded("quiesce", "the last tokens", 1.0), touched=touched)
        elif ending is InstallEnding.LOST_QUIETING:
            self._lost(stream, e.EngineDied(engine_id=self._life.agent.name, cause="killed while it became quiet"))
        return ending in (InstallEnding.NOT_QUIET, InstallEnding.LOST_QUIETING)

    def _loaded(self, stream: int, update: Update, ending: InstallEnding) -> None:
        if not self.fails_loading(stream, update, ending):
            self.loaded(stream, update, ending)

    def fails_loading(self, stream: int, update: Update, ending: InstallEnding) -> bool:
        """Whether it ended with some bytes in."""
        name, version = self._life.agent.name, str(update.version)
        if ending is InstallEnding.TOUCHED:
            self.failed(stream, e.InstallFailed(name, version, True, "a worker failed"), touched=True)
        elif ending is InstallEnding.TIMED_OUT:
            self._lost(stream, e.InstallTimedOut(name, version, 1.0))
        elif ending is InstallEnding.DIED:
            self._lost(stream, e.EngineDied(engine_id=name, cause="killed in mid-install"))
        return ending in (InstallEnding.TOUCHED, InstallEnding.TIMED_OUT, InstallEnding.DIED)

    def loaded(self, stream: int, update: Update, ending: InstallEnding) -> None:
        """Every byte is in."""
        staged = self._life.staged[stream]
        self._world.witness.check(not staged.closed, "INV-12", f"{self._life} reads what was dropped")
        self._engine.install_worked(staged.digest())
        self._life.after(self._some(0.3), lambda: self._spoke(stream, update, ending))

    def _spoke(self, stream: int, update: Update, ending: InstallEnding) -> None:
        self._world.faults.point(self._life.agent, "engine.after_install")
        if self._engine.residency is Residency.WEIGHTS:  # it speaks when it has a KV cache
            self._owed = ending
            self._life.apply(ee.CanaryDeferred(Timings()))
            self._install_over(stream)
            return
        if ending is InstallEnding.CANARY:
            error = e.CanaryFailed(self._life.agent.name, str(update.version), "a logprob is not finite")
            self.failed(stream, error, touched=True)
            return
        self._engine.heard = self._engine.content
        said = STRANGE if ending is InstallEnding.STRANGE else USUAL
        self._life.apply(ee.CanaryPassed(Timings(), Canary((said,))))
        self._install_over(stream)

    def failed(self, stream: int, error: e.WeightplaneError, *, touched: bool) -> None:
        self._world.witness.refused(error)
        self._life.apply(ee.InstallEnded(error, touched))
        if touched:
            self._life.requests.abort_all()
        self._install_over(stream)

    def _lost(self, stream: int, error: e.WeightplaneError) -> None:
        """An unknown outcome: the processes go, and a new incarnation takes their place."""
        self.failed(stream, error, touched=True)
        self._life.die(str(error))

    def _install_over(self, stream: int) -> None:
        self._streaming.pop(stream, None)
        self._life.drop(stream)
        self._turns.done()

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
            self._let_finish(self._world.kernel.now + how.wait_seconds, hold)
        else:
            hold()

    def _held(self, hold: Hold, *, abort: bool, told: Action) -> None:
        if abort and hold in self._life.core.state.holds and self._life.running:
            self._stop_scheduler()
            self._life.requests.abort_all()
        told()
        self._turns.done()

    def stall(self, seconds: float) -> None:
        """The engine's core answers nothing for so long: its agent holds the gate until it does (INV-10)."""
        hold = Hold(HoldKind.STALLED, self._life.agent.name)
        if self.idle and not self._engine.stalled:
            self._engine.stalled = True
            self._life.apply(ee.HoldChanged(hold, True))
            self._life.after(seconds, lambda: self._answers(hold))

    def _answers(self, hold: Hold) -> None:
        self._engine.stalled = False
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
        self._stop_scheduler()
        self._life.after(self._world.kernel.rng.uniform(*SLEEP_SECONDS), lambda: self._slept(level, told))

    def _slept(self, level: int, told: Action) -> None:
        self._world.faults.point(self._life.agent, "engine.mid_sleep")
        if self._world.faults.engine_fails():
            self._life.die("it does not sleep")
            return
        self._engine.sleep(level)
        self._world.witness.check_memory(self._life, at_rest=False)
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
        self._life.after(self._world.kernel.rng.uniform(*SLEEP_SECONDS), lambda: self._woke(kv, told))

    def _woke(self, kv: bool, told: Action) -> None:
        self._world.faults.point(self._life.agent, "engine.mid_wake")
        if self._world.faults.engine_fails():
            self._life.die("it does not wake")
            return
        self._engine.wake(kv=kv)
        self._life.apply(ee.Woke(kv))
        if owes_canary(self._life.core.state):
            self._life.after(self._some(0.3), lambda: self._speaks_at_last(told))
        else:
            self._over(told)

    def _speaks_at_last(self, told: Action) -> None:
        if self._owed is InstallEnding.CANARY:
            self._life.apply(ee.Disproven("a logprob is not finite"))
        else:
            self._engine.heard = self._engine.content
            said = STRANGE if self._owed is InstallEnding.STRANGE else USUAL
            self._life.apply(ee.Proven(Canary((said,))))
        self._over(told)

    def _over(self, told: Action) -> None:
        told()
        self._turns.done()
        self._world.witness.check_memory(self._life, at_rest=self.idle)

    # ---- the gate ----

    def look_at_gate(self) -> None:
        """Level-triggered: the scheduler runs exactly while `_may_step`."""
        if not self._looks:
            self._looks = True
            self._life.after(0.0, lambda: self._turns.take(self._follow_gate))

    def _follow_gate(self) -> None:
        self._looks = False
        state, steps = self._life.core.state, self._may_step()
        if isinstance(state.weights, Poisoned):
            self._life.requests.abort_all()
        if steps and not self.scheduler_runs and state.applied is not None:
            self._life.requests.release(state.applied)
            self._engine.running = self.scheduler_runs = True
            self._life.requests.look_again()
        elif not steps and self.scheduler_runs and state.life is LifeWord.RUNNING and not state.installing:
            self._stop_scheduler()  # an install does it itself
        self._turns.done()

    def _may_step(self) -> bool:
        """The gate is open, or only what lets requests finish shuts it."""
        state, served = self._life.core.state, self._life.core.served
        others = frozenset(h for h in state.holds if h.kind not in LETS_FINISH)
        if others != state.holds and self.scheduler_runs and state.applied is not None:
            served |= {state.applied}
        return replace(state, holds=others).gate_open(served)

    def _stop_scheduler(self) -> None:
        if self.scheduler_runs:
            self._engine.running = self.scheduler_runs = False
            self._life.requests.draw_border()
            if self._world.faults.spans_disagree():
                self._life.apply(ee.SpansDisagreed("our account of a request is not the engine's"))
