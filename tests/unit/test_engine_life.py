"""One life of an engine: how an install ended is told to each who asks, whenever, and never for another install; and
sleep, waking and draining, whoever else asks for them meanwhile."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest

from controlplane.core import engine_events as events
from controlplane.core.assembly import Record
from controlplane.core.canary import Canary
from controlplane.core.engine_state import EngineState, Held, Hold, HoldKind, Poisoned, Residency, Unset
from controlplane.core.errors import (
    CanaryFailed,
    DeadlineExceeded,
    DevicesTaken,
    EngineDied,
    EngineNotReady,
    InstallFailed,
    UpdateInProgress,
    WrongModel,
)
from controlplane.core.layout import DType, Layout, TensorSpec, content_digest
from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import FROZEN, EngineId, Incarnation, ModelName, RunId, Term, UpdateId, WeightVersion
from controlplane.failpoints import DIRECTORY_VARIABLE
from engine_agent.life.engine_life import EngineLife
from engine_agent.life.remembered import Memory
from engine_agent.memory.engine import MemoryEngine, MemorySettings
from engine_agent.receivers.inline import InlineReceiver
from engine_agent.receivers.port import Buffer
from engine_agent.receivers.staging import Staging
from engine_agent.services.lifecycle_service import report_of, status_of
from tests.support.eventually import eventually

LAYOUT = Layout((TensorSpec("w", DType.F32, (4,)),))
CHECKSUM = hashlib.sha256(b"x").digest()[:8]
VERSION, UPDATE = WeightVersion(1, Term(1)), UpdateId("u")


async def started(tmp_path: Path, engine: MemoryEngine | None = None) -> EngineLife:
    state = EngineState(RunId("run"), ModelName("policy"), EngineId("e0"), Incarnation("i"))
    life = EngineLife(
        state, engine or MemoryEngine(MemorySettings(), "e0"), Memory(tmp_path / "e0.json", "run", "policy")
    )
    await life.start()
    life.apply(events.FleetChanged(Term(1), Term(1), frozenset()))
    return life


def commit(life: EngineLife, stream: int, version: WeightVersion = VERSION) -> None:
    """Everything up to the install's start, as the service does it. VERSION's update is UPDATE, 2's is "u2"."""
    update = UPDATE if version == VERSION else UpdateId(f"u{version.number}")
    head = (RunId("run"), ModelName("policy"), Incarnation("i"), update, Term(1), version, LAYOUT.digest, 1, 16)
    accept = next(x for x in life.apply(events.Opened(stream, *head)) if isinstance(x, events.Accept))
    if accept.layout_needed:
        life.apply(events.LayoutArrived(stream, LAYOUT))
    receiver = InlineReceiver(Staging(LAYOUT))
    life.keep(stream, receiver)
    records = [Record(0, 0, 0, 16, CHECKSUM)]
    life.apply(events.ChunkArrived(stream, version, 0, records, 16))
    receiver.place(records, [Buffer("", inline=bytes(16))])
    life.apply(events.BytesVerified(stream))
    effects = life.apply(events.CommitArrived(stream, version, 1, 16, content_digest([CHECKSUM])))
    life.start_install(next(x for x in effects if isinstance(x, events.StartInstall)))


async def test_inv6_a_failure_is_told_also_to_who_asks_after_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    (tmp_path / "worker.install").write_text("raise")
    life = await started(tmp_path)
    commit(life, 1)
    for _ in range(2):
        with pytest.raises(InstallFailed):
            await asyncio.wait_for(life.outcome(UPDATE), 5)
    await life.end("done")


async def test_inv6_the_same_update_installed_again_is_not_answered_from_the_first_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    life = await started(tmp_path)
    commit(life, 1)
    await asyncio.wait_for(life.outcome(UPDATE), 5)
    life.apply(events.SpansDisagreed("poisoned since"))
    (tmp_path / "worker.install").write_text("raise")
    commit(life, 2)
    with pytest.raises(InstallFailed):
        await asyncio.wait_for(life.outcome(UPDATE), 5)
    await life.end("done")


class SlowCanary(MemoryEngine):
    """Its canary passes its limit once the weights were replaced."""

    async def canary(self, prompt: Sequence[int] | None = None) -> Canary:
        raise DeadlineExceeded("canary", "the engine core", 1.0)


async def test_inv4_any_failure_after_the_first_byte_is_poison_also_where_nothing_was_held(tmp_path: Path) -> None:
    life = await started(tmp_path, SlowCanary(MemorySettings(), "e0"))
    commit(life, 1)
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(life.outcome(UPDATE), 5)
    assert isinstance(life.core.state.weights, Poisoned)
    await life.end("done")


# ---- sleep and waking ---------------------------------------------------------------------------

ME, YOU = "me", "you"


async def serving(tmp_path: Path, **settings: float) -> tuple[EngineLife, MemoryEngine]:
    """It holds VERSION and serves it."""
    engine = MemoryEngine(MemorySettings(**settings), "e0")  # type: ignore[arg-type]
    life = await started(tmp_path, engine)
    commit(life, 1)
    await asyncio.wait_for(life.outcome(UPDATE), 5)
    life.apply(events.FleetChanged(Term(1), Term(1), frozenset({VERSION})))
    await eventually(lambda: life.open)
    return life, engine


async def generated(life: EngineLife, max_tokens: int) -> tuple[int, str | None]:
    """Tokens of one request, and how it ended."""
    count, reason = 0, None
    async for part in life.requests.run("r", VERSION, [1, 2, 3], SamplingSettings(max_tokens=max_tokens)):
        count, reason = count + len(part.delta.token_ids), part.delta.finish_reason
    return count, reason


def sleep(life: EngineLife, owner: str = ME, level: int = 1) -> asyncio.Task[None]:
    return asyncio.create_task(life.sleep(events.SleepRequested(owner, level)))


def wake(life: EngineLife, owner: str = ME, *, kv: bool = True) -> asyncio.Task[None]:
    return asyncio.create_task(life.wake(events.WakeRequested(owner, kv)))


def residency(life: EngineLife) -> Residency:
    return life.core.state.residency


async def test_p2_asleep_nothing_is_on_the_device_and_awake_it_serves_on(tmp_path: Path) -> None:
    life, engine = await serving(tmp_path, seconds_per_token=0.001)
    full = engine.device_bytes
    sample = asyncio.create_task(generated(life, 50))
    await eventually(lambda: len(life.requests) == 1)
    await sleep(life)
    assert (engine.device_bytes, residency(life), life.open) == (0, Residency.ASLEEP, False)
    assert life.core.state.applied == VERSION
    await wake(life, kv=False)
    assert (residency(life), life.core.state.held_by(HoldKind.ASLEEP)) == (Residency.WEIGHTS, ME)
    assert 0 < engine.device_bytes < full
    await wake(life)
    assert (engine.device_bytes, residency(life)) == (full, Residency.AWAKE)
    assert await asyncio.wait_for(sample, 5) == (50, "length")
    await life.end("done")


async def test_p2_level_2_drops_the_version_before_the_weights(tmp_path: Path) -> None:
    life, _ = await serving(tmp_path, sleep_seconds=0.05)
    going = sleep(life, level=2)
    await eventually(lambda: residency(life) is Residency.ASLEEP)
    assert not going.done()
    assert life.core.state.weights == Unset()
    await going
    await wake(life)
    assert (life.core.state.weights, residency(life), life.open) == (Unset(), Residency.AWAKE, False)
    await life.end("done")


@pytest.mark.parametrize("sound", [True, False])
async def test_inv1_what_was_installed_without_a_kv_cache_serves_only_after_its_canary(
    tmp_path: Path, *, sound: bool
) -> None:
    life, engine = await serving(tmp_path)
    trainer = "trainer:t"
    await sleep(life, trainer, level=2)
    await wake(life, trainer, kv=False)
    newer = WeightVersion(2, Term(1))
    commit(life, 2, newer)
    found = await asyncio.wait_for(life.outcome(UpdateId("u2")), 5)
    life.apply(events.FleetChanged(Term(1), Term(1), frozenset({newer})))
    assert (found.canary, life.core.state.applied, life.open) == (None, newer, False)
    assert "kv" not in engine.resident
    if not sound:
        life.engine = SilentCanary(engine)  # type: ignore[assignment]
    await wake(life, trainer)
    assert life.core.state.held_by(HoldKind.UNPROVEN) is None
    if sound:
        await eventually(lambda: life.open)
    else:
        assert isinstance(life.core.state.weights, Poisoned)
    await life.end("done")


class SilentCanary:
    """An engine whose canary found fault."""

    def __init__(self, engine: MemoryEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    async def canary(self, prompt: Sequence[int] | None = None) -> Canary:
        raise CanaryFailed("e0", "2", "a logprob is not finite")


async def test_the_weights_memory_alone_does_not_bring_back_an_engine_that_died_asleep(tmp_path: Path) -> None:
    """Its trainer pushes beside what it holds itself: a fresh engine would take all of the devices."""
    life = await started(tmp_path)
    await life.sleep(events.SleepRequested("trainer:t", 1))
    await life.end("killed")
    for kv in (False, True):
        with pytest.raises(EngineNotReady):
            await life.wake(events.WakeRequested("trainer:t", kv))
        assert life.lent.free.is_set() is kv


async def test_a_sleep_that_was_asked_for_while_it_woke_leaves_the_devices_free(tmp_path: Path) -> None:
    life, engine = await serving(tmp_path, sleep_seconds=0.05)
    await sleep(life)
    waking = wake(life)
    await asyncio.sleep(0.01)
    sleeping = sleep(life, YOU)
    await asyncio.gather(waking, sleeping)
    assert (engine.device_bytes, residency(life)) == (0, Residency.ASLEEP)
    with pytest.raises(DevicesTaken):
        await wake(life)
    await wake(life, YOU)
    assert residency(life) is Residency.AWAKE
    await life.end("done")


async def test_two_who_wake_it_at_once_both_get_what_they_asked_for(tmp_path: Path) -> None:
    life, _ = await serving(tmp_path, sleep_seconds=0.05)
    await sleep(life)
    await asyncio.gather(wake(life, kv=False), wake(life, kv=True))
    assert residency(life) is Residency.AWAKE
    assert life.core.state.held_by(HoldKind.ASLEEP) is None
    await life.end("done")


async def test_two_who_put_it_to_sleep_both_return_when_the_devices_are_free(tmp_path: Path) -> None:
    life, engine = await serving(tmp_path, sleep_seconds=0.05)
    first, second = sleep(life), sleep(life, YOU)
    for call in (second, first):
        await call
        assert engine.device_bytes == 0
    await life.end("done")


@pytest.mark.parametrize("when", ["before", "during"])
async def test_a_cancelled_sleep_either_did_nothing_or_goes_to_its_end(tmp_path: Path, when: str) -> None:
    life, engine = await serving(tmp_path, sleep_seconds=0.05)
    if when == "before":  # it waits behind another's
        await sleep(life, YOU)
        other = wake(life, YOU)
        await asyncio.sleep(0)
    going = sleep(life)
    await asyncio.sleep(0.01)
    going.cancel()
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
    life, _ = await serving(tmp_path, install_seconds=0.1)
    newer = WeightVersion(2, Term(1))
    commit(life, 2, newer)
    await eventually(lambda: life.core.state.weights == Unset())
    with pytest.raises(UpdateInProgress):
        await sleep(life)
    await wake(life)
    life.apply(events.HoldChanged(Hold(HoldKind.OPERATOR, ME), present=False))
    assert (life.core.gate_open, life.open) == (False, False)
    await asyncio.wait_for(life.outcome(UpdateId("u2")), 5)
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
    life, _ = await serving(tmp_path, seconds_per_token=0.001)
    sample = asyncio.create_task(generated(life, 100))
    await eventually(lambda: life.core.state.live_requests == 1)
    drain(life)
    life.apply(events.FleetChanged(Term(1), Term(1), served))
    assert not life.open
    assert await asyncio.wait_for(sample, 5) == (100, "length")
    await eventually(lambda: life.core.state.live_requests == 0)
    drain(life, present=False)
    await eventually(lambda: life.open is (VERSION in served))
    await life.end("done")


async def test_a_draining_engine_that_is_paused_too_stands_still_and_then_goes_on(tmp_path: Path) -> None:
    life, _ = await serving(tmp_path, seconds_per_token=0.001)
    sample = asyncio.create_task(generated(life, 100))
    await eventually(lambda: life.core.state.live_requests == 1)
    drain(life)
    pause = Hold(HoldKind.OPERATOR, ME)
    life.apply(events.HoldChanged(pause, present=True))
    await eventually(lambda: not life.steps)
    await asyncio.sleep(0.05)
    assert not sample.done()
    life.apply(events.HoldChanged(pause, present=False))
    assert await asyncio.wait_for(sample, 5) == (100, "length")
    assert not life.open
    await life.end("done")


# ---- what it is -----------------------------------------------------------------------------------


async def test_an_engine_that_dies_while_nobody_asks_it_anything_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_agent.life.progress.PROBE_SECONDS", 0.01)
    life, engine = await serving(tmp_path)
    engine._death = "signal 9"
    assert "signal 9" in await asyncio.wait_for(life.died, 5)
    await life.end("done")


async def test_inv4_an_engine_that_dies_in_an_install_is_noticed_when_the_install_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_agent.life.progress.PROBE_SECONDS", 0.01)
    life, engine = await serving(tmp_path, install_seconds=0.1)
    commit(life, 2, WeightVersion(2, Term(1)))
    await eventually(lambda: life.core.state.weights == Unset())
    engine._death = "signal 9"
    await asyncio.wait_for(life.died, 5)
    progress = life.core.state.progress
    assert progress is not None
    assert progress.stage.final
    await life.end("done")


async def test_a_frozen_models_engine_serves_what_it_loaded_and_poison_ends_its_life(tmp_path: Path) -> None:
    life = await started(tmp_path, MemoryEngine(MemorySettings(), "e0", serve_initial=True))
    weights = life.core.state.weights
    assert isinstance(weights, Held)
    assert (weights.version, weights.content_digest) == (FROZEN, life.facts.initial_digest if life.facts else None)
    life.apply(events.FleetChanged(Term(1), Term(0), frozenset({FROZEN})))
    await eventually(lambda: life.open)
    parts = life.requests.run("r", FROZEN, [1], SamplingSettings(max_tokens=3))
    assert [p.spans[0].version async for p in parts if p.spans] == [FROZEN]
    life.apply(events.SpansDisagreed("one token too many"))
    assert "one token too many" in await asyncio.wait_for(life.died, 5)
    await life.end("done")


async def test_l4_an_engine_that_does_not_answer_is_not_open_until_it_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes live: only a round trip through the core tells (INV-10)."""
    monkeypatch.setattr("engine_agent.life.progress.PROBE_SECONDS", 0.01)
    monkeypatch.setattr("engine_agent.life.progress.STALL_SECONDS", 0.05)
    engine, answers = MemoryEngine(MemorySettings(), "e0"), asyncio.Event()
    answers.set()
    monkeypatch.setattr(engine, "probe", answers.wait)
    life = await started(tmp_path, engine)
    answers.clear()
    await eventually(lambda: life.core.state.held_by(HoldKind.STALLED) == "e0")
    assert not life.open
    looked = life.progress.looks
    await eventually(lambda: life.progress.looks > looked)  # the agent itself goes on
    answers.set()
    await eventually(lambda: life.core.state.held_by(HoldKind.STALLED) is None)
    await life.end("the test is over")


async def test_l4_a_round_trip_that_waits_behind_an_install_is_no_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_agent.life.progress.PROBE_SECONDS", 0.01)
    monkeypatch.setattr("engine_agent.life.progress.STALL_SECONDS", 0.03)
    engine = MemoryEngine(MemorySettings(), "e0")
    monkeypatch.setattr(engine, "probe", asyncio.Event().wait)
    life = await started(tmp_path, engine)
    async with life.gate.standing_still():  # under the lock that installs take
        looked = life.progress.looks
        await eventually(lambda: life.progress.looks > looked + 20)
        assert life.core.state.held_by(HoldKind.STALLED) is None
    await eventually(lambda: life.core.state.held_by(HoldKind.STALLED) == "e0")
    await life.end("the test is over")


async def test_a_heartbeat_is_byte_for_byte_the_report_before_it_while_nothing_changes(tmp_path: Path) -> None:
    """So the coordinator compares bytes, and reads nothing again; conditions, and their dates, it makes itself."""
    life = await started(tmp_path)
    head = (Incarnation("i"), UPDATE, Term(1), VERSION, LAYOUT.digest, 1, 16)
    with pytest.raises(WrongModel):
        life.apply(events.Opened(1, RunId("run"), ModelName("another"), *head))
    first = report_of(life).SerializeToString()
    await asyncio.sleep(0.01)
    assert report_of(life).SerializeToString() == first
    assert report_of(life).HasField("refused")
    assert not report_of(life).conditions
    assert status_of(life).conditions
    await life.end("the test is over")
