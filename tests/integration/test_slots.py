"""Slots of real processes: training ranks that join in any order, engines of any size on their devices and others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from controlplane.devices import cpu_device_uuid
from tests.support.eventually import eventually
from tests.support.local_fleet import LocalFleet
from tests.support.toy_rank import Script
from tests.support.toy_trainer import RankProcess, fleet_for_toys, segments, start_engine, toy_trainer
from weightplane.v1 import operator_pb2, operator_pb2_grpc

pytestmark = pytest.mark.timeout(400)

RING = {"ring-0": (0, 1), "ring-1": (1, 2), "ring-2": (2, 3), "ring-10": (3, 0)}
"""Engines that take turns on four devices: each rank is in two slots, and the slots go round. Two ranks that entered
their groups in different orders would wait for each other for ever."""


def start(fleet: LocalFleet, engines: dict[str, tuple[int, ...]]) -> None:
    for name, indices in engines.items():
        start_engine(fleet, name, device_uuids=tuple(cpu_device_uuid(i) for i in indices))


async def codes(ranks: list[RankProcess]) -> list[int]:
    return [await rank.code() for rank in ranks]


def outcomes(rank: RankProcess) -> list[dict[str, str]]:
    return [line["outcomes"] for line in rank.said("pushed")]


async def planned(fleet: LocalFleet) -> dict[str, list[int]]:
    """Each engine's ranks, as the trainer is here."""
    stub: Any = operator_pb2_grpc.OperatorStub(fleet.channel(fleet.address))

    async def plan() -> operator_pb2.PlanResponse:
        assert (await fleet.view()).trainers, "the trainer has not said hello yet"
        found = await stub.Plan(operator_pb2.PlanRequest(model="policy"), timeout=60)
        assert isinstance(found, operator_pb2.PlanResponse)
        return found

    found = await eventually(plan, within=180)
    return {a.engine.engine_id: list(a.ranks) for a in found.plan.assignments}


@pytest.mark.parametrize("order", [None, (3, 1, 0, 2)], ids=["at-once", "in-an-order-of-their-own"])
async def test_G1_G5_ranks_of_crossing_slots_that_join_in_any_order_push_to_engines_of_all_sizes(
    tmp_path: Path, order: tuple[int, ...] | None
) -> None:
    """The lowest rank of each slot leads, and only it: an engine that two ranks wrote to would refuse the second."""
    engines = {**RING, "all": (2, 0, 3, 1), "one": (3,), "apart": (9,)}
    script = Script(pause_before_step=2)
    async with fleet_for_toys(tmp_path, engines=0) as fleet, toy_trainer(fleet.address) as trainer:
        start(fleet, dict(reversed(engines.items())) if order else engines)
        await fleet.wait_for_engines(len(engines))
        if order is None:
            ranks = await trainer.start_ranks(script, world=4)
        else:
            ranks = await trainer.join_ranks_in(order, script, devices=(0, 1, 2, 3))
        assert await planned(fleet) == {
            "all": [0, 1, 2, 3],
            "apart": [1],
            "one": [3],
            "ring-0": [0, 1],
            "ring-1": [1, 2],
            "ring-2": [2, 3],
            "ring-10": [0, 3],
        }
        assert await codes(ranks) == [0, 0, 0, 0]
        assert [outcomes(r) for r in ranks] == [[dict.fromkeys(sorted(engines), "APPLIED")]] * 4
    await eventually(lambda: segments() == [])


async def test_G9_ranks_feed_the_engines_on_their_devices_whatever_number_they_have_themselves(tmp_path: Path) -> None:
    async with fleet_for_toys(tmp_path, engines=0) as fleet, toy_trainer(fleet.address) as trainer:
        start(fleet, {"e0": (0,), "e1": (1,)})
        await fleet.wait_for_engines(2)
        ranks = await trainer.join_ranks_in((0, 1), Script(pause_before_step=2), devices=(1, 0))
        assert await planned(fleet) == {"e0": [1], "e1": [0]}
        assert await codes(ranks) == [0, 0]
        assert outcomes(ranks[0]) == [{"e0": "APPLIED", "e1": "APPLIED"}]


async def test_G4_ranks_too_few_for_an_engine_are_told_both_numbers_before_any_of_them_waits_for_another(
    tmp_path: Path,
) -> None:
    async with fleet_for_toys(tmp_path, engines=0) as fleet, toy_trainer(fleet.address) as trainer:
        start(fleet, {"tp4": (0, 1, 2, 3)})
        await fleet.wait_for_engines(1)
        ranks = await trainer.start_ranks(Script())
        assert await codes(ranks) == [0, 0]
        missing = ", ".join(sorted(cpu_device_uuid(i) for i in (2, 3)))
        for rank in ranks:
            (refused,) = rank.said("refused")
            assert refused["reason"] == "ENGINE_MISFIT"
            assert "tp4: 2 of its 4 devices are held by trainer ranks; missing: " in refused["text"]
            assert set(refused["text"].rpartition("missing: ")[2].split(", ")) == set(missing.split(", "))
            assert rank.said("joined") == []
