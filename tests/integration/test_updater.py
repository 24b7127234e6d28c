"""The updater of vime's and slime's training actors, in a loop as theirs: real ranks, in-memory engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from controlplane.core.errors import InvalidRequest, UpdateFailed
from controlplane.core.versions import Term, WeightVersion
from tests.support.eventually import eventually
from tests.support.local_fleet import LocalFleet
from tests.support.toy_trainer import RankProcess, fleet_for_toys, segments, start_engine, toy_trainer
from trainer_agent.adapters.updater import WeightplaneUpdater
from trainer_agent.rank import PushReport

pytestmark = pytest.mark.timeout(400)


class Manager:
    """The rollout manager: what it answers before each update, and what became of it."""

    def __init__(self, work: Path) -> None:
        self._work = work

    def answer(self, rollout_id: int, engines: Sequence[Any], new: int) -> None:
        part = self._work / "part"
        part.write_text(json.dumps([engines, new]))
        part.rename(self._work / f"engines-{rollout_id}.json")

    async def updated(self, ranks: Sequence[RankProcess], rollout_id: int) -> list[tuple[int, str]]:
        """On each rank: its version, and the error."""

        def said() -> list[tuple[int, str]]:
            lines = [[u for u in r.said("updated") if u["rollout_id"] == rollout_id] for r in ranks]
            assert all(lines), f"update {rollout_id} is not over on all ranks"
            return [(found[0]["weight_version"], found[0]["error"]) for found in lines]

        answer: list[tuple[int, str]] = await eventually(said, within=180)
        return answer


async def test_a_loop_as_slimes_updates_every_engine_and_meets_new_ones_without_groups_of_its_own(
    tmp_path: Path,
) -> None:
    async with fleet_for_toys(tmp_path, 1) as fleet, toy_trainer(fleet.address) as trainer:
        manager = Manager(tmp_path)
        ranks = await trainer.run_ranks(["tests.support.slime_rank", str(tmp_path), "4"])
        manager.answer(0, ["e0"], new=1)
        assert await manager.updated(ranks, 0) == [(1, "")] * 2
        manager.answer(1, ["e0"], new=0)
        assert await manager.updated(ranks, 1) == [(2, "")] * 2
        start_engine(fleet, "e1")
        await fleet.wait_for_engines(2)
        manager.answer(2, ["e0", "e1"], new=1)
        assert await manager.updated(ranks, 2) == [(3, "")] * 2
        await eventually(lambda: _hold(fleet, 3, "e0", "e1"))
        # An engine that recovers is no engine any more for a while: the loop hears of it, and the number has moved.
        await fleet.stop("e1")
        manager.answer(3, ["e0", "e1"], new=0)
        (number, error), other = await manager.updated(ranks, 3)
        assert (number, error) == other
        assert number == await fleet.applied("e0") == 4
        assert "without engines that this loop uses: e1" in error
        assert await asyncio.gather(*(rank.code() for rank in ranks)) == [0, 0]
    assert segments() == []


async def _hold(fleet: LocalFleet, number: int, *engine_ids: str) -> bool:
    return [await fleet.applied(engine_id) for engine_id in engine_ids] == [number] * len(engine_ids)


class FixedRank:
    """In place of a TrainerRank: says what the fleet would, or fails."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.error: Exception | None = None
        self.outcomes = {"e0": "APPLIED", "e1": "APPLIED"}

    def push(self, step: int) -> PushReport:
        self.steps.append(step)
        if self.error:
            raise self.error
        return PushReport(WeightVersion(90 + len(self.steps), Term(2)), step, "COMMITTED", dict(self.outcomes))


def updater_of(rank: FixedRank) -> WeightplaneUpdater:
    return WeightplaneUpdater(rank)  # type: ignore[arg-type]


class RayActor:
    """A handle as Ray's: it has the actor's methods, and no other attribute."""

    def __repr__(self) -> str:
        return "Actor(VLLMEngine, 0100)"


class AgentsActor:
    weightplane_engine_id = "e1"


def test_ray_actors_without_an_agent_are_refused_by_name_and_nothing_changes() -> None:
    updater = updater_of(FixedRank())
    updater.connect_rollout_engines(["e0"])
    with pytest.raises(InvalidRequest, match=r"Actor\(VLLMEngine, 0100\); give engine ids"):
        updater.connect_rollout_engines(["e1", RayActor()], object())
    with pytest.raises(InvalidRequest, match="e0, e0"):
        updater.connect_rollout_engines(["e0", "e0"])
    updater.update_weights()
    assert updater.weight_version == 91


@pytest.mark.parametrize("engines", [[], ["e0"], ["e0", AgentsActor()]])
def test_whatever_names_engines_of_the_fleet_is_taken(engines: list[Any]) -> None:
    updater = updater_of(FixedRank())
    updater.connect_rollout_engines(engines, None, [1] * len(engines), [0] * len(engines), [{}] * len(engines))
    updater.update_weights()
    assert updater.report is not None
    assert (updater.weight_version, updater.report.step) == (91, 1)


def test_the_version_moves_with_the_fleet_and_not_with_the_attempt() -> None:
    rank = FixedRank()
    updater = updater_of(rank)
    updater.update_weights()
    rank.error = UpdateFailed(update_id="u", version="2.92", cause="no", outcomes="e0 FAILED")
    with pytest.raises(UpdateFailed):
        updater.update_weights()
    assert updater.weight_version == 91
    rank.error = None
    updater.update_weights(step=700)
    assert (updater.weight_version, rank.steps) == (93, [1, 2, 700])


@pytest.mark.parametrize("outcome", ["RECEIVING", "READY", "INSTALLING"])
def test_a_new_engine_that_is_still_on_its_way_is_no_error(outcome: str) -> None:
    rank = FixedRank()
    rank.outcomes["e1"] = outcome
    updater = updater_of(rank)
    updater.connect_rollout_engines(["e0", "e1"])
    updater.update_weights()
    assert updater.weight_version == 91


def test_a_number_that_the_loop_wrote_is_overwritten_by_the_coordinators() -> None:
    updater = updater_of(FixedRank())
    updater.weight_version = 5000
    updater.update_weights()
    assert updater.weight_version == 91


@pytest.mark.parametrize("outcome", ["LOST", "FAILED: INSTALL_FAILED", "ABORTED: SHAPE_MISMATCH", None])
def test_p3_a_connected_engine_without_the_version_is_an_error_with_every_outcome(outcome: str | None) -> None:
    rank = FixedRank()
    rank.outcomes = {"e0": "APPLIED"} | ({"e1": outcome} if outcome else {})
    updater = updater_of(rank)
    updater.connect_rollout_engines(["e0", "e1"])
    with pytest.raises(UpdateFailed, match=rf"uses: e1; engines: e0 APPLIED; e1 {outcome or 'NOT IN THE PLAN'}"):
        updater.update_weights()
    assert updater.weight_version == 91
    updater.disconnect_rollout_engines()
    updater.update_weights()
