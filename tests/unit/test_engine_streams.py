"""How long a push stays with engines that its decision did not wait for."""

from __future__ import annotations

import pytest

from trainer_agent.agent.streams import AWAITED_SECONDS, STRAGGLER_SECONDS, patience
from weightplane.v1 import fleet_pb2, version_pb2, weight_update_pb2

STAGED, STREAMING = weight_update_pb2.APPLY_STAGED, weight_update_pb2.APPLY_STREAMING


@pytest.mark.parametrize(
    ("apply", "awaited", "seconds"),
    [
        (STREAMING, True, AWAITED_SECONDS),
        (STREAMING, False, STRAGGLER_SECONDS),
        (STAGED, True, STRAGGLER_SECONDS),
    ],
)
def test_only_an_awaited_engine_whose_bytes_come_after_go_is_stayed_with_for_long(
    apply: weight_update_pb2.Apply.ValueType, awaited: bool, seconds: float
) -> None:
    """A staged one has its bytes by then. A streaming one that is left in their middle is poisoned by each push."""
    engine = version_pb2.EngineRef(engine_id="e0", incarnation="i1")
    assignments = [fleet_pb2.Assignment(engine=engine, apply=apply)]
    state = fleet_pb2.UpdateState(engines=[fleet_pb2.EngineOutcome(engine=engine, awaited=awaited)])
    assert patience(assignments, state) == seconds
