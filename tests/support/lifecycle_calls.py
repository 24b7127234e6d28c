"""`Lifecycle` of an agent, called by hand: where it is, what it says of itself, and the stacks that it tells."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.local_fleet import RUN, LocalFleet
from tests.support.toy_trainer import ToyTrainer
from weightplane.v1 import lifecycle_pb2, lifecycle_pb2_grpc


def lifecycle(fleet: LocalFleet, address: str) -> Any:
    return lifecycle_pb2_grpc.LifecycleStub(fleet.channel(address))


def address_of(trainer: ToyTrainer) -> str:
    serving = trainer.agent._serving
    assert serving is not None
    return serving.address


async def status_of(fleet: LocalFleet, address: str) -> lifecycle_pb2.TrainerAgentStatus:
    response = await lifecycle(fleet, address).GetStatus(lifecycle_pb2.GetStatusRequest(run_id=RUN), timeout=60)
    assert isinstance(response.trainer, lifecycle_pb2.TrainerAgentStatus)
    return response.trainer


def traced(text: str) -> str:
    """Stacks, where this machine lets us look."""
    assert "py-spy is not installed" not in text
    if "py-spy:" in text and "Permission" in text:
        pytest.skip(f"this machine does not let a process look at another: {text}")
    return text
