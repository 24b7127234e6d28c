"""A short run of what `make fuzz` does at length."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.run import Report, fuzz
from tests.support.every_rpc import every_rpc

FRAMES = 400


async def test_malformed_frames_at_every_service_get_typed_refusals_and_cost_no_memory(tmp_path: Path) -> None:
    report: Report = await fuzz(FRAMES, first_seed=1, directory=tmp_path)
    assert report.well, "\n".join(report.lines())
    assert report.frames >= FRAMES
    assert report.sent_to == {rpc.path for rpc in every_rpc()}, "every RPC of every service"
    assert {"INVALID_MESSAGE", "WRONG_RUN", "gRPC's RESOURCE_EXHAUSTED"} <= report.answers.keys()
