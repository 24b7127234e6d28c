"""Rules of the contract that only a wrong writer, engine or order can attack, each at its smallest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import cast

import pytest

from controlplane.core import engine_events as ee
from controlplane.core import errors as e
from controlplane.core import fleet_effects as fx
from controlplane.core import fleet_events as fe
from controlplane.core.engine_state import Stage
from controlplane.core.layout import content_digest
from controlplane.core.sampling import SamplingSettings
from controlplane.core.update_transaction import Phase
from controlplane.core.versions import Term, UpdateId
from controlplane.sim.runner import run_seed
from controlplane.sim.settings import SimSettings
from engine_agent.engine import Engine, GenerationDelta, LiveRequests
from engine_agent.life.requests import Part, Requests
from tests.support.engine_core import Agent, checksums, version
from tests.support.fleet_core import POLICY, RUN, TTL, Fleet


@pytest.mark.parametrize("frame", ["chunk", "commit"])
def test_inv2_a_frame_of_another_version_than_the_streams_is_refused(frame: str) -> None:
    agent = Agent()
    if frame == "chunk":
        agent.open(1)
        with pytest.raises(e.FrameOutOfOrder):
            agent.chunk(2)
        return
    agent.receive(1)
    with pytest.raises(e.FrameOutOfOrder):
        agent.handle(ee.CommitArrived(1, version(2), 1, 28, content_digest(checksums(1))))
    assert agent.stage is Stage.READY


def test_inv5_the_version_that_is_held_is_not_written_again_by_another_update() -> None:
    agent = Agent()
    agent.apply(1)
    with pytest.raises(e.StaleVersion):
        agent.open(1, stream=2, update_id="other")


def test_inv7_the_coordinator_plans_nothing_for_a_fenced_term() -> None:
    f = Fleet()
    f.engine("e0")
    f.trainer()
    f.trainer("t2", name="other", takeover=True)
    update = f.begin("u1", term=2)
    with pytest.raises(e.StaleTerm):
        f.handle(fe.AbortRequested(RUN, update.update_id, Term(1), "a zombie's word"))
    assert f.core.open_update(POLICY) is update


def test_inv8_an_engine_that_is_silent_for_longer_than_the_leases_time_is_unknown_and_its_session_ends() -> None:
    f = Fleet()
    session = f.engine("e0")
    f.pass_time(TTL + 1)
    closed = [x.session for x in f.effects if isinstance(x, fx.CloseSession)]
    assert closed == [session]


def test_inv10_a_route_needs_an_open_gate() -> None:
    f = Fleet()
    engines = {"e0": f.engine("e0")}
    f.trainer()
    f.push("u1", engines)
    record = f.core.engines[f.states["e0"].engine_id]
    assert f.core.routable(record)
    f.handle(fe.EngineReported(engines["e0"], f.states["e0"], False))
    assert not f.core.routable(record)


def test_numbers_are_never_given_twice_also_over_a_restart() -> None:
    f = Fleet()
    f.engine("e0")
    f.trainer()
    numbers = [f.begin("u1").version.number]
    f.handle(fe.AbortRequested(RUN, UpdateId("u1"), Term(1), "enough"))
    again = Fleet(f.ledger)
    again.engine("e0")
    again.trainer("t1", held=1)
    again.handle(fe.Tick())
    numbers.append(again.begin("u2").version.number)
    assert numbers == [1, 2]


def test_a_quiet_world_lights_up_and_stays_lit() -> None:
    """No fault at all: every engine serves what was pushed."""
    world, violation = run_seed(1, 0, SimSettings(engines=8))
    assert violation is None, str(violation)
    assert world.witness.coverage.phases[(Phase.GO, Phase.COMMITTED)] > 0


def test_inv10_a_route_needs_a_served_version() -> None:
    f = Fleet()
    engines = {"e0": f.engine("e0")}
    f.trainer()
    f.push("u1", engines)
    record = f.core.engines[f.states["e0"].engine_id]
    assert f.core.routable(record)
    f.core.model(POLICY).served = (version(9),)
    assert not f.core.routable(record)


# ---- INV-11: the border in a live sample ----


class Tape:
    """An engine's side of `Requests`: gives out what the test puts on it."""

    def __init__(self) -> None:
        self.deltas: asyncio.Queue[GenerationDelta] = asyncio.Queue()

    async def generate(
        self, request_id: str, prompt_token_ids: Sequence[int], sampling: SamplingSettings
    ) -> AsyncGenerator[GenerationDelta, None]:
        while True:
            yield await self.deltas.get()


async def sample_over_a_border(engine_spans: tuple[tuple[str, int, int], ...]) -> tuple[list[Part], list[str]]:
    """One token before a border, one that still comes behind it, one after the gate opened with version 2."""
    tape, disagreed = Tape(), list[str]()
    requests = Requests(cast(Engine, tape), lambda live: None, disagreed.append)
    sample = requests.run("r", version(1), [1], SamplingSettings(max_tokens=3))
    await tape.deltas.put(GenerationDelta((7,), ()))
    parts = [await anext(sample)]
    requests.draw_border(LiveRequests({"r": 1}))
    await tape.deltas.put(GenerationDelta((8,), ()))
    behind = asyncio.ensure_future(anext(sample))
    await asyncio.wait({behind}, timeout=0.05)
    assert not behind.done(), "what comes behind the border waits"
    requests.release(version(2))
    parts.append(await behind)
    await tape.deltas.put(GenerationDelta((9,), (), finish_reason="length", engine_spans=engine_spans))
    parts.append(await anext(sample))
    return parts, disagreed


async def test_inv11_what_comes_behind_the_border_is_the_next_versions() -> None:
    parts, disagreed = await sample_over_a_border((("1", 0, 1), ("2", 1, 3)))
    assert [p.version for p in parts] == [version(1), version(2), version(2)]
    assert [(s.version.number, s.start, s.end) for s in parts[-1].spans] == [(1, 0, 1), (2, 1, 3)]
    assert not disagreed


async def test_inv11_the_engines_own_spans_must_agree() -> None:
    with pytest.raises(e.SpanMismatch):
        await sample_over_a_border((("1", 0, 2), ("2", 2, 3)))


async def test_inv11_tokens_that_the_engine_counted_otherwise_are_noticed_at_the_border() -> None:
    tape, disagreed = Tape(), list[str]()
    requests = Requests(cast(Engine, tape), lambda live: None, disagreed.append)
    sample = requests.run("r", version(1), [1], SamplingSettings(max_tokens=3))
    await tape.deltas.put(GenerationDelta((7,), ()))
    await anext(sample)
    requests.draw_border(LiveRequests({"r": 2}))
    assert disagreed
