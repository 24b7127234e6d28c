"""Sleep, waking and draining of one life of an engine, whoever else asks for them meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from controlplane.core import engine_events as events
from controlplane.core.canary import Canary
from controlplane.core.engine_state import Hold, HoldKind, Poisoned, Residency, Unset
from controlplane.core.errors import CanaryFailed, DevicesTaken, EngineDied, EngineNotReady, UpdateInProgress
from controlplane.core.versions import Term, UpdateId, WeightVersion
from engine_agent.life.engine_life import EngineLife
from engine_agent.memory.engine import MemoryEngine, MemorySettings
from tests.cases.engines import Hand
from tests.support.engine_life import VERSION, commit, generated, outcome, serving, started
from tests.support.eventually import PATIENCE_SECONDS, eventually

ME, YOU = "me", "you"


def sleep(life: EngineLife, owner: str = ME, level: int = 1) -> asyncio.Task[None]:
    return asyncio.create_task(life.power.sleep(events.SleepRequested(owner, level)))


def wake(life: EngineLife, owner: str = ME, *, kv: bool = True) -> asyncio.Task[None]:
    return asyncio.create_task(life.power.wake(events.WakeRequested(owner, kv)))


def residency(life: EngineLife) -> Residency:
    return life.core.state.residency


async def sample_of(life: EngineLife, hand: Hand, tokens: int) -> asyncio.Task[tuple[int, str | None]]:
    """A request that the engine has and that does not end before `hand` lets samples run."""
    hand.limit_samples(5)
    sample = asyncio.create_task(generated(life, tokens))
    await eventually(lambda: life.core.state.live_requests == 1)
    return sample


async def test_p2_asleep_nothing_is_on_the_device_and_awake_it_serves_on(tmp_path: Path) -> None:
    hand = Hand()
    life, engine = await serving(tmp_path, hand)
    full = engine.device_bytes
    sample = await sample_of(life, hand, 50)
    await sleep(life)
    hand.limit_samples(None)
    assert (engine.device_bytes, residency(life), life.open) == (0, Residency.ASLEEP, False)
    assert life.core.state.applied == VERSION
    await wake(life, kv=False)
    assert (residency(life), life.core.state.held_by(HoldKind.ASLEEP)) == (Residency.WEIGHTS, ME)
    assert 0 < engine.device_bytes < full
    await wake(life)
    assert (engine.device_bytes, residency(life)) == (full, Residency.AWAKE)
    assert await asyncio.wait_for(sample, PATIENCE_SECONDS) == (50, "length")
    await life.end("done")


async def test_p2_level_2_drops_the_version_before_the_weights(tmp_path: Path) -> None:
    hand = Hand()
    life, _ = await serving(tmp_path, hand)
    stands = hand.hold("sleep")
    going = sleep(life, level=2)
    await stands.reached.wait()
    assert residency(life) is Residency.ASLEEP
    assert not going.done()
    assert life.core.state.weights == Unset()
    stands.go.set()
    await going
    await wake(life)
    assert (life.core.state.weights, residency(life), life.open) == (Unset(), Residency.AWAKE, False)
    await life.end("done")


@pytest.mark.parametrize("sound", [True, False])
async def test_inv1_what_was_installed_without_a_kv_cache_serves_only_after_its_canary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, sound: bool
) -> None:
    life, engine = await serving(tmp_path)
    trainer = "trainer:t"
    await sleep(life, trainer, level=2)
    await wake(life, trainer, kv=False)
    newer = WeightVersion(2, Term(1))
    commit(life, 2, newer)
    found = await outcome(life, UpdateId("u2"))
    life.apply(events.FleetChanged(Term(1), Term(1), frozenset({newer})))
    assert (found.canary, life.core.state.applied, life.open) == (None, newer, False)
    assert "kv" not in engine.resident
    if not sound:
        monkeypatch.setattr(engine, "canary", finds_fault)
    await wake(life, trainer)
    assert life.core.state.held_by(HoldKind.UNPROVEN) is None
    if sound:
        await eventually(lambda: life.open)
    else:
        assert isinstance(life.core.state.weights, Poisoned)
    await life.end("done")


async def finds_fault(prompt: Sequence[int] | None = None) -> Canary:
    raise CanaryFailed("e0", "2", "a logprob is not finite")


async def test_the_weights_memory_alone_does_not_bring_back_an_engine_that_died_asleep(tmp_path: Path) -> None:
    """Its trainer pushes beside what it holds itself: a fresh engine would take all of the devices."""
    life = await started(tmp_path)
    await life.power.sleep(events.SleepRequested("trainer:t", 1))
    await life.end("killed")
    for kv in (False, True):
        with pytest.raises(EngineNotReady):
            await life.power.wake(events.WakeRequested("trainer:t", kv))
        assert life.lent.free.is_set() is kv


async def test_a_sleep_that_was_asked_for_while_it_woke_leaves_the_devices_free(tmp_path: Path) -> None:
    hand = Hand()
    life, engine = await serving(tmp_path, hand)
    await sleep(life)
    stands = hand.hold("wake")
    waking = wake(life)
    await stands.reached.wait()
    sleeping = sleep(life, YOU)
    await asyncio.sleep(0)  # it asked
    stands.go.set()
    await asyncio.gather(waking, sleeping)
    assert (engine.device_bytes, residency(life)) == (0, Residency.ASLEEP)
    with pytest.raises(DevicesTaken):
        await wake(life)
    await wake(life, YOU)
    assert residency(life) is Residency.AWAKE
    await life.end("done")


async def test_two_who_wake_it_at_once_both_get_what_they_asked_for(tmp_path: Path) -> None:
    hand = Hand()
    life, _ = await serving(tmp_path, hand)
    await sleep(life)
    stands = hand.hold("wake")
    calls = asyncio.gather(wake(life, kv=False), wake(life, kv=True))
    await stands.reached.wait()
    stands.go.set()
    await calls
    assert residency(life) is Residency.AWAKE
    assert life.core.state.held_by(HoldKind.ASLEEP) is None
    await life.end("done")


async def test_two_who_put_it_to_sleep_both_return_when_the_devices_are_free(tmp_path: Path) -> None:
    hand = Hand()
    life, engine = await serving(tmp_path, hand)
    stands = hand.hold("sleep")
    first, second = sleep(life), sleep(life, YOU)
    await stands.reached.wait()
    assert not first.done()
    assert not second.done()
    stands.go.set()
    for call in (second, first):
        await call
        assert engine.device_bytes == 0
    await life.end("done")


@pytest.mark.parametrize("when", ["before", "during"])
async def test_a_cancelled_sleep_either_did_nothing_or_goes_to_its_end(tmp_path: Path, when: str) -> None:
    hand = Hand()
    life, engine = await serving(tmp_path, hand)
    if when == "before":  # it waits behind another's
        await sleep(life, YOU)
        stands = hand.hold("wake")
        other = wake(life, YOU)
        await stands.reached.wait()
        going = sleep(life)
        await asyncio.sleep(0)
    else:
        stands = hand.hold("sleep")
        going = sleep(life)
        await stands.reached.wait()
    going.cancel()
    stands.go.set()
    with pytest.raises(asyncio.CancelledError):
        await going
    if when == "before":
        await other
    asleep = when == "during"
    assert residency(life) is (Residency.ASLEEP if asleep else Residency.AWAKE)
    assert (engine.device_bytes == 0) is asleep
    if asleep:
        await wake(life)
    await eventually(lambda: life.open)
    await life.end("done")


async def test_inv4_an_install_is_never_cut_by_sleep_and_waking_in_its_middle_opens_nothing(tmp_path: Path) -> None:
    hand = Hand()
    life, _ = await serving(tmp_path, hand)
    stands, newer = hand.hold("half"), WeightVersion(2, Term(1))
    commit(life, 2, newer)
    await stands.reached.wait()
    assert life.core.state.weights == Unset()
    with pytest.raises(UpdateInProgress):
        await sleep(life)
    await wake(life)
    life.apply(events.HoldChanged(Hold(HoldKind.OPERATOR, ME), present=False))
    assert (life.core.gate_open, life.open) == (False, False)
    stands.go.set()
    await outcome(life, UpdateId("u2"))
    assert life.core.state.applied == newer
    await life.end("done")


class Insomniac(MemoryEngine):
    """Its devices do not come free."""

    async def sleep(self, level: int) -> None:
        raise RuntimeError("cumem: invalid argument")


async def test_an_engine_that_does_not_sleep_ends_its_life(tmp_path: Path) -> None:
    life = await started(tmp_path, Insomniac(MemorySettings(), "e0"))
    with pytest.raises(EngineDied, match="cumem: invalid argument"):
        await sleep(life)
    assert "cumem: invalid argument" in await life.died
    await life.end("done")


# ---- draining -----------------------------------------------------------------------------------


def drain(life: EngineLife, *, present: bool = True) -> None:
    life.apply(events.HoldChanged(Hold(HoldKind.DRAINING, ME), present))


@pytest.mark.parametrize("served", [frozenset({VERSION}), frozenset({WeightVersion(2, Term(1))})])
async def test_who_is_in_a_draining_engine_goes_on_to_the_end(tmp_path: Path, served: frozenset[WeightVersion]) -> None:
    hand = Hand()
    life, _ = await serving(tmp_path, hand)
    sample = await sample_of(life, hand, 100)
    drain(life)
    life.apply(events.FleetChanged(Term(1), Term(1), served))
    assert not life.open
    hand.limit_samples(None)
    assert await asyncio.wait_for(sample, PATIENCE_SECONDS) == (100, "length")
    await eventually(lambda: life.core.state.live_requests == 0)
    drain(life, present=False)
    await eventually(lambda: life.open is (VERSION in served))
    await life.end("done")


async def test_a_draining_engine_that_is_paused_too_stands_still_and_then_goes_on(tmp_path: Path) -> None:
    hand = Hand()
    life, _ = await serving(tmp_path, hand)
    sample = await sample_of(life, hand, 100)
    drain(life)
    pause = Hold(HoldKind.OPERATOR, ME)
    life.apply(events.HoldChanged(pause, present=True))
    await eventually(lambda: not life.gate.runs)
    hand.limit_samples(None)
    await asyncio.sleep(0.05)
    assert not sample.done()
    life.apply(events.HoldChanged(pause, present=False))
    assert await asyncio.wait_for(sample, PATIENCE_SECONDS) == (100, "length")
    assert not life.open
    await life.end("done")
