"""INV-7: who has an engine's devices outlives the agent, from before the engine sleeps until they are free."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from controlplane.core import engine_events as events
from controlplane.core.engine_state import EngineState, Held, Hold, HoldKind, Life, Residency
from controlplane.core.errors import EngineNotReady, LedgerError, UnsupportedByEngine
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, Term
from engine_agent.daemon import building
from engine_agent.daemon.settings import EngineSettings
from engine_agent.life.engine_life import EngineLife
from engine_agent.life.remembered import Lent, Memory
from engine_agent.memory.engine import MemoryEngine, MemorySettings

TRAINER, PERSON = "trainer:t0", "ann"
DEVICE = "GPU-0"


def memory(tmp_path: Path) -> Memory:
    return Memory(tmp_path / "e0.json", "run", "policy")


async def started(tmp_path: Path, engine: MemoryEngine | None = None) -> EngineLife:
    state = EngineState(RunId("run"), ModelName("policy"), EngineId("e0"), Incarnation("i"))
    engine = engine or MemoryEngine(MemorySettings(device_uuids=(DEVICE,)), "e0")
    life = EngineLife(state, engine, memory(tmp_path))
    await life.start()
    life.apply(events.FleetChanged(Term(1), Term(4), frozenset()))
    return life


async def dead_for(tmp_path: Path, *owners: str) -> EngineLife:
    """The life of an agent that started anew; these had its engine's devices when the last one died."""
    memory(tmp_path).note_lent(Lent(owners, 4, (DEVICE,)))
    settings = EngineSettings("e0", run_id="run", state_dir=tmp_path, backend="memory")
    return building.first_life(settings, memory(tmp_path), None)


class Looks(MemoryEngine):
    """Reads what is noted when it is told to sleep."""

    def __init__(self, memory: Memory) -> None:
        super().__init__(MemorySettings(device_uuids=(DEVICE,)), "e0")
        self._memory = memory
        self.noted: Lent | None = None

    async def sleep(self, level: int) -> None:
        self.noted = self._memory.lent()
        await super().sleep(level)


async def test_the_lending_is_on_the_disk_before_the_engine_sleeps_and_until_it_is_wholly_awake(tmp_path: Path) -> None:
    engine = Looks(memory(tmp_path))
    life = await started(tmp_path, engine)
    await life.power.sleep(events.SleepRequested(TRAINER, 1))
    assert engine.noted == Lent((TRAINER,), 4, (DEVICE,))
    await life.power.sleep(events.SleepRequested(PERSON, 1))
    assert memory(tmp_path).lent() == Lent((PERSON, TRAINER), 4, (DEVICE,))
    await life.power.wake(events.WakeRequested(PERSON, True))
    await life.power.wake(events.WakeRequested(TRAINER, False))
    assert memory(tmp_path).lent() == Lent((TRAINER,), 4, (DEVICE,))
    await life.power.wake(events.WakeRequested(TRAINER, True))
    assert memory(tmp_path).lent() is None
    await life.end("done")


async def test_a_sleep_that_is_refused_leaves_no_note(tmp_path: Path) -> None:
    life = await started(tmp_path, MemoryEngine(MemorySettings(can_sleep=False), "e0"))
    with pytest.raises(UnsupportedByEngine):
        await life.power.sleep(events.SleepRequested(TRAINER, 1))
    assert memory(tmp_path).lent() is None
    await life.end("done")


async def test_what_cannot_be_noted_does_not_sleep(tmp_path: Path) -> None:
    life = await started(tmp_path)
    (tmp_path / "e0.lent.tmp").mkdir()
    with pytest.raises(LedgerError):
        await life.power.sleep(events.SleepRequested(TRAINER, 1))
    assert life.core.state.residency is Residency.AWAKE
    assert not life.core.state.holds
    await life.end("done")


async def test_an_agent_that_starts_anew_has_a_dead_engine_that_sleeps_and_starts_none(tmp_path: Path) -> None:
    life = await dead_for(tmp_path, TRAINER)
    state = life.core.state
    assert (state.life, state.residency) == (Life.DEAD, Residency.ASLEEP)
    assert state.holds == {Hold(HoldKind.ASLEEP, TRAINER)}
    assert not isinstance(state.weights, Held)
    assert life.lent.taken
    assert life.lent.device_uuids == (DEVICE,)
    await life.power.sleep(events.SleepRequested("trainer:t1", 2))  # nothing is on the devices: done
    with pytest.raises(EngineNotReady):
        await life.power.sleep(events.SleepRequested(PERSON, 1))


@pytest.mark.parametrize(
    ("holder", "term", "free"),
    [("", 4, True), ("", 3, False), (TRAINER, 4, False), ("trainer:t1", 5, False)],
    ids=["nobody has them", "it knows less", "its owner has them", "another trainer has some"],
)
async def test_a_trainers_hold_ends_when_the_coordinator_knows_that_no_trainer_has_devices(
    tmp_path: Path, holder: str, term: int, free: bool
) -> None:
    life = await dead_for(tmp_path, TRAINER)
    life.lent.heard(holder, Term(term))
    assert life.lent.free.is_set() is free
    assert (memory(tmp_path).lent() is None) is free


async def test_what_sleeps_for_a_person_too_waits_for_their_word(tmp_path: Path) -> None:
    life = await dead_for(tmp_path, TRAINER, PERSON)
    life.lent.heard("", Term(4))
    assert memory(tmp_path).lent() == Lent((PERSON,), 4, (DEVICE,))
    for owner in (TRAINER, "bob"):
        with pytest.raises(EngineNotReady):
            await life.power.wake(events.WakeRequested(owner, True))
        assert not life.lent.free.is_set()
    with pytest.raises(EngineNotReady):  # weights alone go nowhere
        await life.power.wake(events.WakeRequested(PERSON, False))
    assert not life.lent.free.is_set()
    with pytest.raises(EngineNotReady):
        await life.power.wake(events.WakeRequested(PERSON, True))
    await asyncio.wait_for(life.lent.free.wait(), 60)
    assert memory(tmp_path).lent() is None


@pytest.mark.parametrize(("run", "model"), [("other", "policy"), ("run", "critic")])
def test_what_another_run_or_model_left_says_nothing(tmp_path: Path, run: str, model: str) -> None:
    Memory(tmp_path / "e0.json", run, model).note_lent(Lent((TRAINER,), 1, (DEVICE,)))
    assert memory(tmp_path).lent() is None


@pytest.mark.parametrize("content", ["", "[]", '{"run_id": "run", "model": "policy", "owners": 3}'])
def test_a_damaged_note_is_an_error_and_never_nobody(tmp_path: Path, content: str) -> None:
    (tmp_path / "e0.lent.json").write_text(content)
    with pytest.raises(LedgerError):
        memory(tmp_path).lent()
