"""An agent whose disk is full: what it decided it claims, what it could not note it owes, and no writer is let in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from controlplane.core import engine_effects as fx
from controlplane.core import engine_events as events
from controlplane.core.engine_state import EngineState, HoldKind, Residency, Stage
from controlplane.core.errors import DevicesTaken, LedgerError, UnsupportedByEngine
from controlplane.core.versions import EngineId, Incarnation, ModelName, RunId, Term, UpdateId, WeightVersion
from engine_agent.life import remembered
from engine_agent.life.engine_life import EngineLife
from engine_agent.life.remembered import Lent, Memory, Remembered
from engine_agent.memory.engine import MemoryEngine, MemorySettings
from tests.support.engine_life import LAYOUT, UPDATE, VERSION, commit
from tests.support.full_disk import small_disk

TRAINER, PERSON = "trainer:t0", "ann"
DEVICE = "GPU-0"


class Rig:
    """A life whose state lies on a disk of its own."""

    def __init__(self, directory: Path, fill: Callable[[], None], free: Callable[[], None]) -> None:
        self.fill = fill
        self.free = free
        self.memory = Memory(directory / "e0.json", "run", "policy")
        state = EngineState(RunId("run"), ModelName("policy"), EngineId("e0"), Incarnation("i"))
        self.life = EngineLife(state, MemoryEngine(MemorySettings(device_uuids=(DEVICE,)), "e0"), self.memory)
        self._directory = directory

    def told(self, term: int, *served: WeightVersion) -> None:
        self.life.apply(events.FleetChanged(Term(1), Term(term), frozenset(served)))

    @property
    def on_disk(self) -> Remembered:
        return self.elsewhere.load()

    @property
    def elsewhere(self) -> Memory:
        """As an agent that starts anew would find it."""
        return Memory(self._directory / "e0.json", "run", "policy")

    async def sleep(self, *owners: str) -> None:
        for owner in owners:
            await self.life.power.sleep(events.SleepRequested(owner, 1))

    async def wake(self, owner: str) -> None:
        await self.life.power.wake(events.WakeRequested(owner, True))

    @property
    def sleepers(self) -> set[str]:
        return {h.owner for h in self.life.core.state.holds if h.kind is HoldKind.ASLEEP}


@contextmanager
def _full_disk(directory: Path) -> Iterator[Rig]:
    with small_disk(directory / "disk") as disk:
        yield Rig(disk.path, disk.fill, disk.free)


@contextmanager
def _what_is_in_the_way(directory: Path) -> Iterator[Rig]:
    """Where nobody may mount: the scratch files of both cannot be opened."""
    scratch = [directory / name for name in ("e0.tmp", "e0.number.tmp", "e0.lent.tmp")]

    def fill() -> None:
        for path in scratch:
            path.mkdir()

    def free() -> None:
        for path in scratch:
            path.rmdir()

    yield Rig(directory, fill, free)


@pytest.fixture(params=[_full_disk, _what_is_in_the_way], ids=["a full disk", "a file that cannot be written"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(remembered, "RETRY_SECONDS", 0.0)
    with request.param(tmp_path) as made:
        await made.life.start()
        made.told(1)
        yield made
        await made.life.end("the test is over")


async def test_a_sleep_that_cannot_be_noted_is_refused_and_nothing_is_claimed(rig: Rig) -> None:
    rig.fill()
    with pytest.raises(LedgerError):
        await rig.sleep(TRAINER)
    assert rig.life.core.state.residency is Residency.AWAKE
    assert rig.sleepers == set()


async def test_a_wake_needs_no_room(rig: Rig) -> None:
    await rig.sleep(TRAINER)
    rig.fill()
    await rig.wake(TRAINER)
    assert rig.life.core.state.residency is Residency.AWAKE
    assert rig.elsewhere.lent() is None


async def test_of_two_sleepers_one_gives_and_the_note_names_both_until_there_is_room(rig: Rig) -> None:
    """INV-8: what the engine says is what was decided; the note errs on the side of those who may have the devices."""
    await rig.sleep(TRAINER, PERSON)
    rig.fill()
    await rig.wake(PERSON)
    assert rig.sleepers == {TRAINER}
    assert rig.life.state.value is rig.life.core.state, "it was reported"
    assert rig.elsewhere.lent() == Lent((PERSON, TRAINER), 1, (DEVICE,))
    with pytest.raises(DevicesTaken):
        await rig.wake(PERSON)
    rig.free()
    rig.told(1)
    assert rig.elsewhere.lent() == Lent((TRAINER,), 1, (DEVICE,))
    await rig.wake(TRAINER)
    assert rig.elsewhere.lent() is None


async def test_a_sleep_that_is_refused_says_why_though_its_note_cannot_be_taken_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.sleep(PERSON)
    lent = rig.life.lent
    expect = lent.expect

    def and_then_it_is_full(owner: str) -> None:
        expect(owner)
        rig.fill()

    monkeypatch.setattr(lent, "expect", and_then_it_is_full)
    rig.life.core.capabilities = frozenset()
    with pytest.raises(UnsupportedByEngine):
        await rig.sleep(TRAINER)
    assert rig.sleepers == {PERSON}
    assert rig.elsewhere.lent() == Lent((PERSON, TRAINER), 1, (DEVICE,))
    rig.free()
    rig.told(1)
    assert rig.elsewhere.lent() == Lent((PERSON,), 1, (DEVICE,))


async def test_an_install_that_ends_on_a_full_disk_is_claimed_and_its_number_is_owed(rig: Rig) -> None:
    commit(rig.life, 1)
    rig.fill()
    await asyncio.wait_for(rig.life.installs.outcome(UPDATE), 60)
    assert rig.life.core.state.applied == VERSION
    assert rig.life.state.value.applied == VERSION
    assert rig.on_disk.number < VERSION.number
    rig.free()
    rig.told(1)
    assert rig.on_disk.number == VERSION.number


async def test_inv7_no_writer_is_let_in_while_a_term_that_was_seen_is_not_on_the_disk(rig: Rig) -> None:
    rig.fill()
    rig.told(2)
    assert rig.life.core.term == 2, "it is told all the same, and serves what it is told to"
    for stream in (1, 2):
        with pytest.raises(LedgerError):
            rig.life.apply(opened(stream))
        rig.life.streams.over(stream, "refused", "LEDGER_ERROR")
        progress = rig.life.core.state.progress
        assert progress is not None
        assert progress.stage is Stage.ABORTED
    rig.free()
    assert any(isinstance(x, fx.Accept) for x in rig.life.apply(opened(3)))
    assert rig.on_disk.term == 2


async def test_inv7_the_next_life_in_the_same_agent_knows_what_is_owed(rig: Rig) -> None:
    rig.fill()
    rig.told(2)
    assert rig.on_disk.term == 1
    rig.free()
    remembered, _ = rig.memory.begin_life()
    assert remembered.term == 2
    assert rig.on_disk == remembered


async def test_a_note_that_a_full_disk_kept_is_taken_back_by_the_next_life(rig: Rig) -> None:
    rig.memory.note_lent(Lent((PERSON,), 1, (DEVICE,)))
    fresh = EngineLife(rig.life.core.state, MemoryEngine(MemorySettings(), "e0"), rig.elsewhere)
    await fresh.start()
    assert rig.elsewhere.lent() is None
    await fresh.end("the test is over")


def opened(stream: int) -> events.Opened:
    """Of the writer of term 2."""
    version = WeightVersion(5, Term(2))
    head = (RunId("run"), ModelName("policy"), Incarnation("i"), UpdateId("u5"), Term(2), version)
    return events.Opened(stream, *head, LAYOUT.digest, 1, 16)
