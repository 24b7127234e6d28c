"""INV-7: what an agent has seen outlives it."""

from __future__ import annotations

from pathlib import Path

import pytest

from controlplane.core.errors import LedgerError
from engine_agent.remembered import Memory, Remembered


def test_what_was_saved_is_there_for_the_next_life(tmp_path: Path) -> None:
    Memory(tmp_path / "deep" / "e0.json", "run").save(Remembered(term=3, coordinator_term=2, number=41))
    assert Memory(tmp_path / "deep" / "e0.json", "run").load() == Remembered(3, 2, 41)


def test_nothing_was_seen_before_the_first_save(tmp_path: Path) -> None:
    assert Memory(tmp_path / "e0.json", "run").load() == Remembered()


def test_l7_another_runs_terms_say_nothing_here(tmp_path: Path) -> None:
    Memory(tmp_path / "e0.json", "run").save(Remembered(term=9))
    assert Memory(tmp_path / "e0.json", "other").load() == Remembered()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"run_id": "run", "surprise": 1}'])
def test_a_damaged_file_is_an_error_and_never_a_zero(tmp_path: Path, content: str) -> None:
    (tmp_path / "e0.json").write_text(content)
    with pytest.raises(LedgerError):
        Memory(tmp_path / "e0.json", "run").load()


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "not-a-directory").write_text("")
    with pytest.raises(LedgerError):
        Memory(tmp_path / "not-a-directory" / "e0.json", "run").save(Remembered(term=1))
