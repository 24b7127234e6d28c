"""Three cells of the kill matrix, on one fleet of real processes; `make kill-matrix` tries all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kill_matrix.fleet import running_fleet
from tests.kill_matrix.matrix import Outcome, cells
from tests.kill_matrix.run import run_cell


@pytest.mark.timeout(240)
async def test_the_fleet_heals_from_a_kill_and_claims_nothing_wrong(tmp_path: Path) -> None:
    async with running_fleet(tmp_path / "fleet") as fleet:
        for name, outcomes in (
            ("between_chunks:leader", {Outcome.KEPT}),
            ("mid_install:engine", {Outcome.COMMITTED, Outcome.DEGRADED, Outcome.KEPT}),
            ("before_decision:coordinator", {Outcome.COMMITTED}),
        ):
            [cell] = cells(name)
            finding = await run_cell(fleet, cell)
            assert finding.problems == (), name
            assert finding.outcome in outcomes, name
        assert all(o.samples for o in fleet.observers.values())
