"""Sleep and waking of one engine: who may ask, what becomes resident when, and when a version that nobody heard yet is.

Promises: only who put an engine to sleep wakes it, since its devices are theirs; a wake that a later sleep followed
says nothing; nor does a trainer's word that comes after a later one of its own or of its successors (INV-7). A version
that was installed without a KV cache is UNPROVEN until its canary spoke, and poison if the
canary finds fault. Pure: `EngineCore` keeps the state.
"""

from __future__ import annotations

from dataclasses import replace

from controlplane.core import errors as e
from controlplane.core.engine_effects import Effect, Report, StartSleep, StartWake
from controlplane.core.engine_events import SleepRequested, WakeRequested, Woke
from controlplane.core.engine_state import EngineState, Hold, HoldKind, Life, Residency
from controlplane.core.names import TRAINERS
from controlplane.core.versions import NO_TURN, DeviceTurn, Term

SLEEP = "sleep"
"""The capability."""
DROPS_WEIGHTS = 2
"""The level of sleep that keeps nothing."""


class Power:
    """What was asked of an engine's devices and is not done yet."""

    def __init__(self) -> None:
        self._waking = 0
        """Wakes whose `Woke` is to come; they end in the order in which they were asked for."""
        self._outdated = 0
        """Those before them that a sleep followed."""
        self._turn = NO_TURN
        """The latest that a trainer's word came in."""
        self._slept: dict[str, DeviceTurn] = {}
        """In which turn it was last put to sleep, by owner; of people in none."""

    def heed(self, state: EngineState, term: Term, event: SleepRequested | WakeRequested) -> None:
        """INV-7: a trainer's word, before anything comes of it; `term` is the highest that this agent ever saw. A dead
        life's, or one that its own life went past, changes nothing; but who was fenced may still give back what it took
        from an engine that lives. A person has no turns. Raises StaleTerm, StaleTurn.
        """
        turn = event.turn
        if turn is None:
            return
        present = max(DeviceTurn(term, 0), self._turn)
        if isinstance(event, WakeRequested) and state.life is Life.RUNNING:
            present = self._slept.get(event.owner, NO_TURN)
        if turn.term < present.term:
            raise e.StaleTerm(model=state.model, got=turn.term, current=present.term)
        if turn < present:
            raise e.StaleTurn(engine_id=state.engine_id, owner=event.owner, got=turn.number, current=present.number)
        self._turn = max(self._turn, turn)

    def sleep(self, state: EngineState, event: SleepRequested) -> tuple[EngineState, list[Effect]]:
        """To be checked with `check_sleep` before; what it takes away is not claimed any more (INV-1)."""
        self._slept[event.owner] = event.turn or NO_TURN
        again = state.residency is Residency.ASLEEP and not self._waking and event.level != DROPS_WEIGHTS
        self._outdated, self._waking = self._outdated + self._waking, 0
        holds = state.holds | {Hold(HoldKind.ASLEEP, event.owner)}
        asleep = replace(state, residency=Residency.ASLEEP, holds=holds)
        return asleep, [Report(), *([] if again else [StartSleep(event.level)])]

    def wake(self, state: EngineState, event: WakeRequested) -> tuple[EngineState, list[Effect]]:
        """Of several sleepers the last one's word does; each one's ends its own hold. What is awake stays so."""
        own = Hold(HoldKind.ASLEEP, event.owner)
        check_running(state)
        others = sorted(h.owner for h in state.holds if h.kind is HoldKind.ASLEEP and h != own)
        if others and event.kv and own in state.holds:
            return replace(state, holds=state.holds - {own}), [Report()]
        if others:
            raise e.DevicesTaken(engine_id=state.engine_id, owner=others[0])
        awake = state.residency is Residency.AWAKE or (state.residency is Residency.WEIGHTS and not event.kv)
        self._waking += not awake
        return state, [Report()] if awake else [StartWake(event.kv)]

    def woke(self, state: EngineState, event: Woke) -> tuple[EngineState, list[Effect]]:
        """Void if a sleep was asked for meanwhile: it follows."""
        if self._outdated:
            self._outdated -= 1
            return state, []
        if not self._waking:
            return state, []
        self._waking -= 1
        awake = event.kv or state.residency is Residency.AWAKE
        if event.kv:
            self._slept.clear()
        asleep = {h for h in state.holds if h.kind is HoldKind.ASLEEP}
        holds = state.holds - asleep if event.kv else state.holds
        return replace(state, residency=Residency.AWAKE if awake else Residency.WEIGHTS, holds=holds), [Report()]


def check_sleep(state: EngineState, capabilities: frozenset[str], event: SleepRequested) -> None:
    """An install is never cut. Raises EngineNotReady, UnsupportedByEngine, ModelFrozen, UpdateInProgress."""
    check_running(state)
    if SLEEP not in capabilities:
        raise e.UnsupportedByEngine(engine_id=state.engine_id, what="sleep")
    if event.level == DROPS_WEIGHTS and state.frozen:
        raise e.ModelFrozen(model=state.model, problem="nobody could bring its weights back")
    if state.installing and state.progress is not None:
        raise e.UpdateInProgress(update_id=state.progress.update_id, version=str(state.progress.version))


def check_resident(state: EngineState, *, by_coordinator: bool) -> None:
    """An install needs the weights' memory (P2). Without a KV cache its canary waits, and that only for a trainer which
    has the devices: nobody brings weights to an engine that sleeps for somebody else. Raises EngineAsleep."""
    if state.residency is Residency.ASLEEP:
        raise e.EngineAsleep(engine_id=state.engine_id, missing="weights and KV cache are")
    sleepers = [h.owner for h in state.holds if h.kind is HoldKind.ASLEEP]
    for_trainer = not by_coordinator and all(owner.startswith(TRAINERS) for owner in sleepers)
    if state.residency is Residency.WEIGHTS and not for_trainer:
        raise e.EngineAsleep(engine_id=state.engine_id, missing="the KV cache is")


def check_running(state: EngineState) -> None:
    if state.life is not Life.RUNNING:
        raise e.EngineNotReady(engine_id=state.engine_id, holds=state.life.value)


def owes_canary(state: EngineState) -> bool:
    """It holds a version whose canary was put off, and could speak now."""
    return state.residency is Residency.AWAKE and state.held_by(HoldKind.UNPROVEN) is not None
