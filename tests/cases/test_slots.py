"""Slots on the wire: which device is which (G9), whose buffer is missing (G2), whose size is another's (G4)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.cases.cargo import SHARED, refusals
from tests.cases.fleet import CaseFleet, case_fleet
from tests.support.eventually import eventually
from tests.support.writer import Weights
from weightplane.v1 import fleet_pb2, operator_pb2, operator_pb2_grpc, weight_update_pb2

A, B = "5f4dcc3b-5aa7-65d6-1d83-27deb882cf99", "7c6a180b-3689-6a0a-8c02-787eeafb0e4c"
"""Two devices, as torch calls them."""


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[CaseFleet]:
    """Only a coordinator."""
    async with case_fleet(tmp_path, 0, lease=False) as fleet:
        yield fleet


def ranks(*devices: str) -> list[fleet_pb2.TrainerRankInfo]:
    return [fleet_pb2.TrainerRankInfo(rank=i, host_id="h", device_uuid=d) for i, d in enumerate(devices)]


class Both:
    """An update's bytes for both devices of the engine: one segment, named once for each device."""

    def __init__(self, fleet: CaseFleet, weights: Weights, devices: list[str]) -> None:
        self._cargo = fleet.cargo(weights, SHARED, 1)
        self._devices = devices
        self.count = 1
        self.weights = weights

    def chunk(self, version: Any, index: int) -> weight_update_pb2.Chunk:
        chunk = self._cargo.chunk(version, index)
        (buffer,) = chunk.buffers
        del chunk.buffers[:]
        for device in self._devices:
            buffer.device_uuid = device
            chunk.buffers.append(buffer)
        return chunk


async def send(fleet: CaseFleet, begun: fleet_pb2.BeginUpdateResponse, weights: Weights, devices: list[str]) -> None:
    """Up to `ready`. Raises what refuses it."""
    delivery = fleet.delivery(begun, "wide", fleet.cargo(weights, SHARED, 1))
    delivery.cargo = Both(fleet, weights, devices)  # type: ignore[assignment]
    await delivery.until_ready()
    await fleet.go(begun.update_id)
    await delivery.commit()
    await delivery.applied()


async def test_G9_an_engine_and_a_trainer_that_write_devices_differently_meet_on_them(fleet: CaseFleet) -> None:
    """torch knows no prefix, nvidia-smi writes one, a person any case: the slot, and the buffers' names to the end."""
    fleet.start_engine_at("wide", device_uuids=(A.upper(), f" gpu-{B}"))
    await fleet.wait_for_engines(1)
    await fleet.new_trainer("t", ranks=ranks(f"GPU-{B}", f"Gpu-{A}"))
    begun = await fleet.begin()
    (assignment,) = begun.plan.assignments
    assert (list(assignment.ranks), assignment.leader) == ([0, 1], 0)
    assert list(assignment.device_uuids) == [f"GPU-{B}", f"GPU-{A}"]
    await send(fleet, begun, Weights(), list(assignment.device_uuids))
    assert await fleet.applied("wide") == begun.version.number


async def test_G9_index_0_of_two_hosts_is_not_one_device(fleet: CaseFleet) -> None:
    fleet.start_engine_at("wide", device_uuids=(f"GPU-{A}",))
    await fleet.wait_for_engines(1)
    await fleet.new_trainer("t", ranks=ranks(f"GPU-{B}"))
    (assignment,) = (await fleet.begin()).plan.assignments
    assert (list(assignment.ranks), list(assignment.device_uuids)) == ([0], [""])
    assert assignment.reason.startswith("devices of its own; another host")


async def test_G2_a_worker_without_a_buffer_is_named_before_the_first_install_and_the_old_version_stays(
    fleet: CaseFleet,
) -> None:
    fleet.start_engine_at("wide", device_uuids=(A, B))
    await fleet.wait_for_engines(1)
    await fleet.new_trainer("t", ranks=ranks(A, B))
    first = await fleet.begin()
    await send(fleet, first, Weights(), [f"GPU-{A}", f"GPU-{B}"])
    await fleet.decided(first.update_id)
    with refusals("DEVICE_HANDLES_MISSING") as refusal:
        await send(fleet, await fleet.begin(1), Weights(), [f"GPU-{B}"])
    assert f"GPU-{A}" in str(refusal[0])
    assert f"GPU-{B}" not in str(refusal[0])
    assert await fleet.applied("wide") == first.version.number
    assert await fleet.is_routable("wide")


async def test_G4_an_engine_larger_than_the_slot_is_refused_at_its_hello_and_fails_no_plan(fleet: CaseFleet) -> None:
    fleet.start_engine_at("good", device_uuids=(B,))
    await fleet.wait_for_engines(1)
    await fleet.new_trainer("t", ranks=ranks(A, B))
    hello = fleet_pb2.EngineHello(
        status=await fleet.status_at((await fleet.engine("good")).endpoint),
        endpoint="127.0.0.1:1",
        host_id="h",
        device_uuids=[A.upper(), "CPU-10", "CPU-2", "CPU-1"],
    )
    hello.status.engine.engine_id, hello.status.engine.incarnation = "wide", "another"
    session = fleet.session()
    await session.say(engine_hello=hello)
    error = await session.end()
    assert (error.reason, error.metadata()["held"], error.metadata()["total"]) == ("ENGINE_MISFIT", "1", "4")
    assert error.metadata()["missing"] == "CPU-1, CPU-2, CPU-10"
    assert [a.engine.engine_id for a in (await fleet.begin()).plan.assignments] == ["good"]


async def test_G4_a_trainer_smaller_than_an_engine_is_refused_at_its_hello_and_gets_no_term(fleet: CaseFleet) -> None:
    fleet.start_engine_at("wide", device_uuids=(A, B))
    await fleet.wait_for_engines(1)
    with refusals("ENGINE_MISFIT") as refusal:
        await fleet.new_trainer("small", ranks=ranks(A))
    assert str(refusal[0]) == f"wide: 1 of its 2 devices are held by trainer ranks; missing: GPU-{B}"
    trainer = await fleet.new_trainer("large", ranks=ranks(A, B))
    assert trainer.term == 1


async def test_G4_two_workers_on_one_device_are_refused_at_the_hello(fleet: CaseFleet) -> None:
    fleet.start_engine_at("good", device_uuids=(B,))
    await fleet.wait_for_engines(1)
    hello = fleet_pb2.EngineHello(
        status=await fleet.status_at((await fleet.engine("good")).endpoint),
        endpoint="127.0.0.1:1",
        host_id="h",
        device_uuids=[A, f"GPU-{A}"],
    )
    session = fleet.session()
    await session.say(engine_hello=hello)
    error = await session.end()
    assert (error.reason, "stands more than once" in str(error)) == ("INVALID_MESSAGE", True)


async def test_G4_a_misfit_that_came_while_the_trainer_was_away_fails_no_plan_and_is_sent_away(
    fleet: CaseFleet,
) -> None:
    trainer = await fleet.new_trainer("t", ranks=ranks(A))
    trainer.die()
    fleet.start_engine_at("good", device_uuids=("CPU-9",))
    await fleet.wait_for_engines(1)
    stub: Any = operator_pb2_grpc.OperatorStub(fleet.channel(fleet.address))
    fleet.start_engine_at("wide", device_uuids=(A, B))

    async def left_out() -> list[tuple[str, str]]:
        """Once its lease could be taken over, so that it is not sure that the trainer comes back."""
        found = await stub.Plan(operator_pb2.PlanRequest(model="policy"), timeout=60)
        assert found.left_out, "it is not known yet"
        return [(e.engine_id, e.cause) for e in found.left_out]

    text = f"wide: 1 of its 2 devices are held by trainer ranks; missing: GPU-{B}"
    assert await eventually(left_out) == [("wide", text)]
    assert [a.engine.engine_id for a in (await fleet.begin()).plan.assignments] == ["good"]
    again = fleet.session()
    trainer.hello.held_term = trainer.term
    await again.say(trainer_hello=trainer.hello)
    assert (await again.welcome()).trainer_term == trainer.term

    async def sent_away() -> bool:
        return not (await fleet.engine("wide")).known

    await eventually(sent_away)
