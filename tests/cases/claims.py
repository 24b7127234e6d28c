"""A version committed on e0, and what must say so: the agent, the coordinator and the tokens."""

from __future__ import annotations

import pytest

from tests.cases.cargo import TRANSPORTS, Transport, transport_name
from tests.cases.fleet import CaseFleet
from tests.cases.samples import tokens_of
from tests.cases.sessions import number_of
from tests.support.writer import Weights
from weightplane.v1 import fleet_pb2

every_transport = pytest.mark.parametrize("transport", TRANSPORTS, ids=transport_name)


async def committed(
    fleet: CaseFleet, weights: Weights, transport: Transport = TRANSPORTS[0], count: int = 2
) -> fleet_pb2.UpdateState:
    state = await fleet.deliver(weights, transport, count)
    assert state.phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    return state


async def holds_exactly(fleet: CaseFleet, number: int, weights: Weights) -> None:
    """The agent says so, the coordinator says so, and the tokens say so."""
    status = await fleet.status("e0")
    assert (number_of(status), status.content_digest) == (number, weights.digest)
    assert number_of((await fleet.engine("e0")).status) == number
    tokens, spans, _ = await fleet.generate("e0", 4)
    assert (tokens, spans) == (tokens_of(weights, 4), [(number, 0, 4)])
