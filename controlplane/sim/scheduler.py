"""When a simulated engine makes tokens: level-triggered by its gate, stopped behind a border (INV-11)."""

from __future__ import annotations

from dataclasses import replace

from controlplane.core import engine_events as ee
from controlplane.core.engine_state import LETS_FINISH, HoldKind, Poisoned
from controlplane.core.engine_state import Life as LifeWord
from controlplane.sim.engine import Turns
from controlplane.sim.kernel import Action
from controlplane.sim.life import Life
from controlplane.sim.requests import Requests
from controlplane.sim.surroundings import Surroundings

LOOK_SECONDS = 0.05


class Scheduler:
    """That of one incarnation. It takes its turn on the engine like all other work."""

    def __init__(self, life: Life, requests: Requests, turns: Turns, around: Surroundings) -> None:
        self._life = life
        self._requests = requests
        self._turns = turns
        self._around = around
        self._looks = False

    @property
    def runs(self) -> bool:
        return self._life.engine.running

    def let_finish(self, until: float, then: Action) -> None:
        """Nobody enters meanwhile. Somebody who keeps the gate shut and lets nobody finish ends the waiting."""
        stops = any(h.kind not in LETS_FINISH | {HoldKind.UPDATING} for h in self._life.core.state.holds)
        if stops or not self._requests.some or self._around.kernel.now >= until:
            then()
        else:
            self._life.after(LOOK_SECONDS, lambda: self.let_finish(until, then))

    def look_at_gate(self) -> None:
        """Level-triggered: the scheduler runs exactly while `_may_step`."""
        if not self._looks:
            self._looks = True
            self._life.after(0.0, lambda: self._turns.take(self._follow_gate))

    def _follow_gate(self) -> None:
        self._looks = False
        state, steps = self._life.core.state, self._may_step()
        if isinstance(state.weights, Poisoned):
            self._requests.abort_all()
        if steps and not self.runs and state.applied is not None:
            self._requests.release(state.applied)
            self._life.engine.running = True
            self._requests.look_again()
        elif not steps and self.runs and state.life is LifeWord.RUNNING and not state.installing:
            self.stop()  # an install does it itself
        self._turns.done()

    def _may_step(self) -> bool:
        """The gate is open, or only what lets requests finish shuts it."""
        state, served = self._life.core.state, self._life.core.served
        others = frozenset(h for h in state.holds if h.kind not in LETS_FINISH)
        if others != state.holds and self.runs and state.applied is not None:
            served |= {state.applied}
        return replace(state, holds=others).gate_open(served)

    def stop(self) -> None:
        if self.runs:
            self._life.engine.running = False
            self._requests.draw_border()
            if self._around.faults.spans_disagree():
                self._life.apply(ee.SpansDisagreed("our account of a request is not the engine's"))
