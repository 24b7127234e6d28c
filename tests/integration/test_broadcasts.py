"""Broadcasts of real rank processes: what is done when a link does not work, or its sender dies."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from controlplane.failpoints import DIRECTORY_VARIABLE
from engine_agent.daemon.agent import run_engine
from engine_agent.receivers import links as engine_links
from tests.support.obedient import ObedientRanks
from tests.support.thread_rank import Source, ThreadRank
from tests.support.toy_rank import Script
from tests.support.toy_trainer import ToyTrainer, engine_settings, fleet_for_toys, toy_trainer
from trainer_agent.agent import plans as agent_plans
from trainer_agent.agent import push as agent_push
from trainer_agent.rank import links as rank_links
from weightplane.v1 import fleet_pb2, weight_update_pb2

pytestmark = pytest.mark.timeout(400)
HOST = {"link_host": "127.0.0.1"}


@contextmanager
def plans(patch: pytest.MonkeyPatch) -> Iterator[list[fleet_pb2.Plan]]:
    """Every plan that the trainer agent is given."""
    seen: list[fleet_pb2.Plan] = []
    check = agent_plans.check_plan

    def noted(plan: fleet_pb2.Plan, world_size: int) -> None:
        seen.append(plan)
        check(plan, world_size)

    patch.setattr(agent_push, "check_plan", noted)
    yield seen


def ways(plan: fleet_pb2.Plan) -> dict[str, str]:
    return {a.engine.engine_id: weight_update_pb2.Transport.Name(a.transport) for a in plan.assignments}


async def one_rank(trainer: ToyTrainer) -> ThreadRank:
    return await ThreadRank.join(trainer.directory / "ranks.sock", TiedSource())


class TiedSource(Source):
    """As the toy engines expect it."""

    def ties(self) -> list[tuple[str, str]]:
        return [("tied", "embed")]


@pytest.mark.parametrize("fate", ["shared", "per_engine"])
async def test_an_engine_that_does_not_reach_the_sender_gets_its_bytes_another_way_and_the_plan_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fate: str
) -> None:
    reach = engine_links.ReceiverLink._reach

    def e1_is_cut_off(self: engine_links.ReceiverLink) -> Any:
        if self._engine_id == "e1":
            self.place = engine_links.LinkPlace("x", "127.0.0.1:1", 2, 1, 1)
        return reach(self)

    monkeypatch.setattr(engine_links.ReceiverLink, "_reach", e1_is_cut_off)
    with plans(monkeypatch) as seen:
        async with (
            fleet_for_toys(tmp_path, transport="broadcast", link_fate=fate) as fleet,
            toy_trainer(fleet.address, **HOST) as trainer,
        ):
            rank = await one_rank(trainer)
            report = await rank.push(1)
            assert report.outcomes == {"e0": "APPLIED", "e1": "APPLIED"}
            await rank.close()
    assert ways(seen[0]) == dict.fromkeys(("e0", "e1"), "TRANSPORT_BROADCAST")
    assert ways(seen[-1]) == {"e0": "TRANSPORT_BROADCAST", "e1": "TRANSPORT_SHARED_MEMORY"}
    (other,) = [a for a in seen[-1].assignments if a.engine.engine_id == "e1"]
    assert (
        "not broadcast, which was asked for: it failed before: the broadcast link to e1 failed (connect)"
        in other.reason
    )
    assert len(seen) == 2, "one failure was enough"


async def test_a_probe_that_arrives_changed_is_no_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = rank_links.probe

    def spoiled(data: bytes) -> Any:
        made = probe(data)
        made[1234] ^= 1
        return made

    monkeypatch.setattr(rank_links, "probe", spoiled)
    with plans(monkeypatch) as seen:
        async with (
            fleet_for_toys(tmp_path, engines=1, transport="broadcast") as fleet,
            toy_trainer(fleet.address, **HOST) as trainer,
        ):
            rank = await one_rank(trainer)
            assert (await rank.push(1)).outcomes == {"e0": "APPLIED"}
            await rank.close()
    assert [ways(p)["e0"] for p in seen] == ["TRANSPORT_BROADCAST", "TRANSPORT_SHARED_MEMORY"]
    assert "(probe): other bytes came than were sent" in seen[-1].assignments[0].reason


async def test_a_link_is_kept_from_update_to_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    connect = rank_links.SenderLink.connect

    def noted(self: rank_links.SenderLink, *arguments: Any) -> None:
        made.append(self.link_id)
        connect(self, *arguments)

    monkeypatch.setattr(rank_links.SenderLink, "connect", noted)
    async with (
        fleet_for_toys(tmp_path, transport="broadcast") as fleet,
        toy_trainer(fleet.address, **HOST) as trainer,
    ):
        rank = await one_rank(trainer)
        for step in (1, 2, 3):
            await rank.push(step)
        await rank.close()
    assert len(made) == 1


async def test_g7_a_trainer_killed_in_a_broadcast_is_followed_by_one_that_makes_links_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No engine is restarted for it, and what the dead one's links held is freed."""
    failpoints = tmp_path / "failpoints"
    failpoints.mkdir()
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(failpoints))
    async with (
        fleet_for_toys(tmp_path, transport="broadcast") as fleet,
        toy_trainer(fleet.address, **HOST) as trainer,
    ):
        (failpoints / "rank.between_chunks").write_text("kill after=3")
        (dead,) = await trainer.start_ranks(Script(steps=1), world=1)
        assert await dead.code() == -signal.SIGKILL
        next_life = await ObedientRanks.start(trainer, world=1)
        for step in (1, 2):
            await fleet.settled()
            [pushed] = await next_life.all("push", step=step)
            assert pushed["outcomes"] == {"e0": "APPLIED", "e1": "APPLIED"}
        assert await next_life.leave() == [0]


async def test_an_engine_that_does_not_take_broadcasts_is_not_sent_any(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    with plans(monkeypatch) as seen:
        async with (
            fleet_for_toys(tmp_path, engines=0, transport="broadcast") as fleet,
            toy_trainer(fleet.address, **HOST) as trainer,
        ):
            settings = engine_settings(fleet, "e0", transports=("shared_memory", "inline"))
            fleet._start("e0", run_engine, settings)
            await fleet.wait_for_engines(1)
            rank = await one_rank(trainer)
            assert (await rank.push(1)).outcomes == {"e0": "APPLIED"}
            await rank.close()
    assert ways(seen[0]) == {"e0": "TRANSPORT_SHARED_MEMORY"}
