"""Installs at a simulated engine, from standing still to the canary, as `engine_agent.life.installing`."""

from __future__ import annotations

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core.canary import Canary
from controlplane.core.engine_state import Poisoned, Residency, Timings
from controlplane.core.engine_update import Update
from controlplane.core.pauses import KEEP, PauseMode, PausePolicy
from controlplane.sim.engine import InstallEnding, Turns
from controlplane.sim.kernel import Action
from controlplane.sim.life import Life
from controlplane.sim.requests import Requests
from controlplane.sim.scheduler import Scheduler
from controlplane.sim.surroundings import Surroundings

INSTALL_SECONDS = (0.02, 0.4)
USUAL, STRANGE = -1.0, -2.0
"""What a canary says."""


def said_by(ending: InstallEnding) -> Canary:
    return Canary((STRANGE if ending is InstallEnding.STRANGE else USUAL,))


class Installs:
    """Those of one incarnation, one at a time. A streaming one goes its own way between standing still and `loaded`."""

    def __init__(
        self, life: Life, requests: Requests, scheduler: Scheduler, turns: Turns, around: Surroundings
    ) -> None:
        self.owed = InstallEnding.WORKS
        """How the canary that was put off ends."""
        self._life = life
        self._requests = requests
        self._scheduler = scheduler
        self._turns = turns
        self._around = around

    def some_seconds(self, part: float) -> float:
        return part * self._around.kernel.rng.uniform(*INSTALL_SECONDS)

    def ending(self) -> InstallEnding:
        """How the next one ends."""
        return self._around.faults.install_ending(self._life.agent.name)

    def start(self, effect: fx.StartInstall) -> None:
        """From here on the agent owns the update."""
        ending = self.ending()
        self._turns.take(
            lambda: self._life.after(
                self.some_seconds(0.1), lambda: self.stand_still(effect.update, lambda: self._quiet(effect, ending))
            )
        )

    def stand_still(self, update: Update, then: Action) -> None:
        """Let requests finish where they are waited for, and stop the scheduler; `then` when no forward pass runs any
        more."""
        self._around.faults.point(self._life.agent, "engine.before_install")
        pause = update.pause or KEEP
        waits = pause.wait_seconds if pause.mode is PauseMode.WAIT and self._scheduler.runs else 0.0
        self._scheduler.let_finish(self._around.kernel.now + waits, lambda: self._stop_for(pause, then))

    def _stop_for(self, pause: PausePolicy, then: Action) -> None:
        self._scheduler.stop()
        mode = pause.fallback if pause.mode is PauseMode.WAIT else pause.mode
        if isinstance(self._life.core.state.weights, Poisoned) or mode is PauseMode.ABORT:
            self._requests.abort_all()
        self._life.after(self.some_seconds(0.5), then)

    def install_seconds(self, part: float) -> float:
        return self.some_seconds(part) + self._around.faults.slow_install(self._life.agent.name)

    def _quiet(self, effect: fx.StartInstall, ending: InstallEnding) -> None:
        stream, update = effect.stream, effect.update
        if self.fails_quieting(stream, update, ending):
            return
        self._life.apply(ee.Quiesced())
        if ending is InstallEnding.UNTOUCHED:
            error = e.InstallFailed(self._life.agent.name, str(update.version), False, "no byte could be read")
            self.failed(stream, error, touched=False)
            return
        self._around.faults.point(self._life.agent, "engine.mid_install")
        self._around.witness.install_begins(self._life)
        self._life.engine.install_begins()
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
        self._around.witness.check(not staged.closed, "INV-12", f"{self._life} reads what was dropped")
        self._life.engine.install_worked(staged.digest())
        self._life.after(self.some_seconds(0.3), lambda: self._spoke(stream, update, ending))

    def _spoke(self, stream: int, update: Update, ending: InstallEnding) -> None:
        self._around.faults.point(self._life.agent, "engine.after_install")
        if self._life.engine.residency is Residency.WEIGHTS:  # it speaks when it has a KV cache
            self.owed = ending
            self._life.apply(ee.CanaryDeferred(Timings()))
            self._install_over(stream)
            return
        if ending is InstallEnding.CANARY:
            error = e.CanaryFailed(self._life.agent.name, str(update.version), "a logprob is not finite")
            self.failed(stream, error, touched=True)
            return
        self._life.engine.heard = self._life.engine.content
        self._life.apply(ee.CanaryPassed(Timings(), said_by(ending)))
        self._install_over(stream)

    def failed(self, stream: int, error: e.WeightplaneError, *, touched: bool) -> None:
        self._around.witness.refused(error)
        self._life.apply(ee.InstallEnded(error, touched))
        if touched:
            self._requests.abort_all()
        self._install_over(stream)

    def _lost(self, stream: int, error: e.WeightplaneError) -> None:
        """An unknown outcome: the processes go, and a new incarnation takes their place."""
        self.failed(stream, error, touched=True)
        self._life.die(str(error))

    def _install_over(self, stream: int) -> None:
        self._life.drop(stream)
        self._turns.done()
