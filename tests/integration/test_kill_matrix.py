"""Some cells of the kill matrix, on fleets of real processes; `make kill-matrix` tries all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kill_matrix import matrix
from tests.kill_matrix.fleet import Fleet, running_fleet
from tests.kill_matrix.matrix import Backend, Outcome, cells
from tests.kill_matrix.run import run_cell


@pytest.mark.timeout(400)
async def test_the_fleet_heals_from_a_kill_and_claims_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matrix, "HEAL_SECONDS", 120.0)  # how soon is the matrix's own matter, on a quiet machine
    async with running_fleet(tmp_path / "fleet") as fleet:
        # A leader that has announced everything by then is missed by nobody: its update may commit.
        await _heals(fleet, "between_chunks:leader", {Outcome.KEPT, Outcome.COMMITTED})
        await _heals(fleet, "mid_install:engine", {Outcome.COMMITTED, Outcome.DEGRADED, Outcome.KEPT})
        await _heals(fleet, "before_decision:coordinator", {Outcome.COMMITTED})
        assert all(o.samples for o in fleet.observers.values())


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_a_fleet_with_a_real_vllm_engine_heals_too(tmp_path: Path) -> None:
    async with running_fleet(tmp_path / "fleet", Backend.VLLM) as fleet:
        await _heals(fleet, "after_install:vllm:stop", {Outcome.DEGRADED, Outcome.COMMITTED})
        await _heals(fleet, "mid_install:vllm", {Outcome.DEGRADED, Outcome.KEPT})
        assert all(o.samples for o in fleet.observers.values())


async def _heals(fleet: Fleet, name: str, outcomes: set[Outcome]) -> None:
    [cell] = cells(name)
    finding = await run_cell(fleet, cell)
    assert finding.problems == (), name
    assert finding.outcome in outcomes, name
