"""Which cells the kill matrix has, how they are named, and how findings are written down."""

from __future__ import annotations

import pytest

from tests.kill_matrix.matrix import PHASES, PROCESSES, STOPPED, Blow, Finding, Outcome, cells, document, table


def test_every_phase_meets_every_process() -> None:
    assert len(cells()) == len(PHASES) * (len(PROCESSES) + len(STOPPED))


@pytest.mark.parametrize(
    ("only", "count"),
    [("mid_install", 9), ("mid_install:engine", 1), ("mid_install:engine:stop", 1), (":coordinator", 10)],
)
def test_a_part_is_named_by_phase_process_and_blow(only: str, count: int) -> None:
    assert len(cells(only)) == count


def test_a_cell_is_found_by_its_own_name() -> None:
    assert all(cells(cell.name) == [cell] for cell in cells())


@pytest.mark.parametrize("only", ["nowhere", "mid_install:nobody", "mid_install:rank:stop"])
def test_a_name_of_nothing_is_refused(only: str) -> None:
    with pytest.raises(ValueError, match="no cell"):
        cells(only)


def test_a_failed_cell_stands_out_with_its_problems() -> None:
    [good], [bad] = cells("mid_install:engine"), cells("mid_install:leader")
    findings = [Finding(good, Outcome.DEGRADED, 2.0, 3.0), Finding(bad, None, problems=("it lied",))]
    assert "| mid_install | **failed** (unknown) | degraded, 2.0 s |" in table(findings, Blow.KILL)
    assert "- mid_install:leader: it lied" in document(findings, 60.0)
