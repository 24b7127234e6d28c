"""One engine is kept at a version, released, drained, paused, resumed, shut down: by the commands, over real gRPC."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from controlplane.cli import engine_orders as orders
from controlplane.cli.ending import CommandFailed
from controlplane.core import errors as e
from controlplane.core.sampling import SamplingSettings
from controlplane.core.versions import Term, WeightVersion
from controlplane.rollout.client import RolloutClient
from tests.support.checkpoint_fleet import checkpoint_fleet, keep, routable, start_engine, words_of
from tests.support.command_line import weightplane
from tests.support.eventually import eventually
from tests.support.local_fleet import LocalFleet
from tests.support.writer import Weights

OWNER = "ada"
SECONDS = 60.0


def at(fleet: LocalFleet, engine_id: str) -> orders.Target:
    return orders.Target(fleet.address, engine_id, SECONDS)


async def test_a_held_engine_serves_its_version_over_restarts_while_the_fleet_moves_on(tmp_path: Path) -> None:
    async with checkpoint_fleet(tmp_path) as fleet:
        old, new = Weights(), Weights()
        await keep(fleet, old, await fleet.push(old))
        assert await orders.keep(at(fleet, "e1"), 1, "", SECONDS) == "e1 stays at version 1.1, and serves it"
        await keep(fleet, new, await fleet.push(new))
        await routable(fleet, "e0", 2)
        assert (await fleet.generate("e1", 4))[:2] == (words_of(old), [(1, 0, 4)])
        await fleet.stop("coordinator")
        await fleet.start_coordinator()
        await fleet.wait_for_engines(2)
        await fleet.stop("e1")
        start_engine(fleet, "e1")
        await routable(fleet, "e1", 1)
        assert (await fleet.generate("e1", 4))[:2] == (words_of(old), [(1, 0, 4)])
        with pytest.raises(CommandFailed, match="e0 has applied number 2 in this incarnation; 1 is not above it"):
            await orders.keep(at(fleet, "e0"), 1, "", 0)
        assert await orders.release(at(fleet, "e1"), SECONDS) == "e1 goes with the fleet, and serves"
        assert (await fleet.generate("e1", 4))[:2] == (words_of(new), [(2, 0, 4)])


async def test_only_a_client_that_asks_is_sent_to_a_held_engine_and_only_for_its_version(tmp_path: Path) -> None:
    async with checkpoint_fleet(tmp_path) as fleet:
        await fleet.push(Weights())
        await routable(fleet, "e1", 1)
        await orders.keep(at(fleet, "e1"), 1, "", SECONDS)
        await fleet.push(Weights())
        await routable(fleet, "e0", 2)
        held, sampling = WeightVersion(1, Term(fleet.term)), SamplingSettings(max_tokens=2)
        async with RolloutClient(fleet.address, include_kept=True) as asks:
            assert (await asks.generate([1, 2], sampling, exact_version=held)).spans[0].version == held
            for _ in range(3):
                assert (await asks.generate([1, 2], sampling)).spans[0].version.number == 2
        async with RolloutClient(fleet.address, wait_seconds=0.5) as does_not_ask:
            await eventually(lambda: does_not_ask.routes)
            with pytest.raises(e.VersionUnavailable):
                await does_not_ask.generate([1, 2], sampling, exact_version=held)


async def test_a_drained_engine_finishes_and_takes_nothing_new_until_it_is_resumed(tmp_path: Path) -> None:
    async with checkpoint_fleet(tmp_path, memory={"seconds_per_token": 0.05}) as fleet:
        await fleet.push(Weights())
        await routable(fleet, "e0", 1)
        running = await fleet.sample_in("e0", 20)
        assert await orders.drain(at(fleet, "e0"), OWNER, SECONDS) == "e0 takes nothing new; 0 requests are in it"
        assert len((await running)[0]) == 20
        assert (await fleet.push(Weights())).engines[0].engine.engine_id == "e1"
        with pytest.raises(CommandFailed, match=r"e0: it is not routable; it is draining after 0.3 s"):
            await orders.resume(at(fleet, "e0"), "somebody", 0.3)
        assert await orders.resume(at(fleet, "e0"), OWNER, 0) == "e0: its gate is shut: ready", "it has missed a push"


async def test_a_paused_engine_says_what_became_of_its_requests_and_is_routable_after_resume(tmp_path: Path) -> None:
    async with checkpoint_fleet(tmp_path, 1) as fleet:
        await fleet.push(Weights())
        await routable(fleet, "e0", 1)
        said = await orders.pause(at(fleet, "e0"), OWNER, "abort", 0)
        assert said == "e0 makes no tokens; 0 requests were ended"
        assert await orders.resume(at(fleet, "e0"), "somebody", 0) == "e0: its gate is shut: operator (ada)"
        assert await orders.resume(at(fleet, "e0"), OWNER, SECONDS) == "e0 is routable"


async def test_an_engine_that_is_shut_down_has_left_when_the_command_ends(tmp_path: Path) -> None:
    async with checkpoint_fleet(tmp_path) as fleet:
        code, out, err = await weightplane(fleet, "engines", "shutdown", "e1", "--wait", "60")
        assert (code, out) == (0, "e1 left\n"), err
        assert [v.status.engine.engine_id for v in (await fleet.view()).engines] == ["e0"]
        assert await asyncio.wait_for(fleet.tasks.pop("e1"), SECONDS) == 0
        code, _, err = await weightplane(fleet, "engines", "drain", "e1")
        assert (code, err) == (1, "weightplane: no engine e1 is known; known are: e0\n")
