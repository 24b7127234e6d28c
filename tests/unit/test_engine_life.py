"""One life of an engine: how an install ended is told to each who asks, whenever, and never for another install; and
what is noticed of an engine that dies or does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from controlplane.core import engine_events as events
from controlplane.core.canary import Canary
from controlplane.core.engine_state import Held, HoldKind, Poisoned
from controlplane.core.errors import DeadlineExceeded, InstallFailed, WrongModel
from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import FROZEN, Incarnation, ModelName, RunId, Term, WeightVersion
from controlplane.failpoints import DIRECTORY_VARIABLE
from engine_agent.memory.engine import MemoryEngine, MemorySettings
from engine_agent.services.lifecycle_service import report_of, status_of
from tests.cases.engines import Hand
from tests.support.engine_life import LAYOUT, UPDATE, VERSION, commit, outcome, serving, started
from tests.support.eventually import PATIENCE_SECONDS, eventually


async def test_inv6_a_failure_is_told_also_to_who_asks_after_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    (tmp_path / "worker.install").write_text("raise")
    life = await started(tmp_path)
    commit(life, 1)
    for _ in range(2):
        with pytest.raises(InstallFailed):
            await outcome(life)
    await life.end("done")


async def test_inv6_the_same_update_installed_again_is_not_answered_from_the_first_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    life = await started(tmp_path)
    commit(life, 1)
    await outcome(life)
    life.apply(events.SpansDisagreed("poisoned since"))
    (tmp_path / "worker.install").write_text("raise")
    commit(life, 2)
    with pytest.raises(InstallFailed):
        await outcome(life)
    await life.end("done")


class SlowCanary(MemoryEngine):
    """Its canary passes its limit once the weights were replaced."""

    async def canary(self, prompt: Sequence[int] | None = None) -> Canary:
        raise DeadlineExceeded("canary", "the engine core", 1.0)


async def test_inv4_any_failure_after_the_first_byte_is_poison_also_where_nothing_was_held(tmp_path: Path) -> None:
    life = await started(tmp_path, SlowCanary(MemorySettings(), "e0"))
    commit(life, 1)
    with pytest.raises(DeadlineExceeded):
        await outcome(life)
    assert isinstance(life.core.state.weights, Poisoned)
    await life.end("done")


async def test_an_engine_that_dies_while_nobody_asks_it_anything_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_agent.life.progress.PROBE_SECONDS", 0.01)
    life, engine = await serving(tmp_path)
    engine._death = "signal 9"
    assert "signal 9" in await asyncio.wait_for(life.died, PATIENCE_SECONDS)
    await life.end("done")


async def test_inv4_an_engine_that_dies_in_an_install_is_noticed_when_the_install_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine_agent.life.progress.PROBE_SECONDS", 0.01)
    hand = Hand()
    life, engine = await serving(tmp_path, hand)
    stands = hand.hold("half")
    commit(life, 2, WeightVersion(2, Term(1)))
    await stands.reached.wait()
    engine._death = "signal 9"
    looked = life.progress.looks
    await eventually(lambda: life.progress.looks > looked)
    assert not life.died.done()
    stands.go.set()
    await asyncio.wait_for(life.died, PATIENCE_SECONDS)
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
    assert "one token too many" in await asyncio.wait_for(life.died, PATIENCE_SECONDS)
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
