"""Which cells the kill matrix has, how they are named, and how findings are written down."""

from __future__ import annotations

import pytest

from tests.kill_matrix.deaths import DEATHS
from tests.kill_matrix.matrix import (
    HEAL_SECONDS,
    PHASES,
    PROCESSES,
    VLLM_HEAL_SECONDS,
    Backend,
    Blow,
    Finding,
    Outcome,
    cells,
    document,
    table,
)
from tests.kill_matrix.run import chosen


def test_every_process_is_killed_and_stopped_at_every_phase() -> None:
    assert len({cell.name for cell in cells()}) == len(cells()) == len(PHASES) * len(PROCESSES) * len(Blow)


@pytest.mark.parametrize(
    ("only", "count"),
    [("mid_install", 12), ("mid_install:engine", 1), ("mid_install:rank:stop", 1), (":vllm", 10)],
)
def test_a_part_is_named_by_phase_process_and_blow(only: str, count: int) -> None:
    assert len(cells(only)) == count


def test_without_a_name_everything_is_tried_and_a_part_is_of_cells_or_of_deaths() -> None:
    assert chosen("") == (cells(), DEATHS)
    assert chosen("deaths") == ([], DEATHS)
    assert chosen(":rank:stop") == (cells(":rank:stop"), ())


def test_a_cell_is_found_by_its_own_name() -> None:
    assert all(cells(cell.name) == [cell] for cell in cells())


def test_the_cells_of_a_real_engine_follow_all_others_and_share_one_fleet() -> None:
    backends = [cell.backend for cell in cells()]
    count = 2 * len(PHASES)
    assert backends == [Backend.MEMORY] * (len(backends) - count) + [Backend.VLLM] * count


def test_only_a_real_engine_that_must_start_anew_is_given_its_time() -> None:
    limits = {cell.name: cell.limit_seconds for cell in cells("mid_install")}
    assert limits.pop("mid_install:vllm") == VLLM_HEAL_SECONDS
    assert set(limits.values()) == {HEAL_SECONDS}


@pytest.mark.parametrize("only", ["nowhere", "mid_install:nobody", "mid_install:rank:pause"])
def test_a_name_of_nothing_is_refused(only: str) -> None:
    with pytest.raises(ValueError, match="no cell"):
        cells(only)


def test_a_failed_cell_stands_out_with_its_problems() -> None:
    [good], [bad] = cells("mid_install:engine"), cells("mid_install:leader")
    findings = [Finding(good, Outcome.DEGRADED, 2.0, 3.0), Finding(bad, None, problems=("it lied",))]
    assert "| mid_install | **failed** (unknown) | degraded, 2.0 s |" in table(findings, Blow.KILL)
    assert "- mid_install:leader: it lied" in document(findings, 60.0)


def test_the_table_has_a_real_engine_beside_the_others_and_the_text_its_own_slowest() -> None:
    [engine], [real] = cells("mid_install:engine"), cells("mid_install:vllm")
    findings = [Finding(engine, Outcome.DEGRADED, 2.0, 3.0), Finding(real, Outcome.DEGRADED, 21.0, 24.0)]
    assert table(findings, Blow.KILL).splitlines()[0] == "| phase | engine agent | engine agent (vLLM) |"
    text = " ".join(document(findings, 60.0).split())
    assert "With in-memory engines the slowest was whole after 2.0 s" in text
    assert "With the vLLM engine the slowest was whole after 21.0 s" in text
