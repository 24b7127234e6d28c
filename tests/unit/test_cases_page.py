"""docs/cases.md has a row for each failure that code and tests name by letter and number, and its tests name it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "cases.md"
ROWS = dict(re.findall(r"^\| ([A-Z]\d+) \|.*\| `(tests/\S+\.py)` \|$", PAGE.read_text(), re.M))
DIRECTORIES = ("controlplane", "engine_agent", "trainer_agent", "tests")
NAMED = re.compile(r"\(([VGMPLRS]\d{1,2})(?:: |, (?=[VGMPLRS]\d)|\))|^\s*\"{3}([VGMPLRS]\d{1,2})\b[:,]", re.M)


def named(text: str) -> set[str]:
    return {first or second for first, second in NAMED.findall(text)}


def test_the_rows_are_read_and_what_names_them_too() -> None:
    assert len(ROWS) == 47
    assert named('"""L2: a life"""\n x (P2), (L2, L7)') == {"L2", "P2"}


@pytest.mark.parametrize("directory", DIRECTORIES)
def test_each_failure_that_is_named_has_a_row(directory: str) -> None:
    for file in sorted((ROOT / directory).rglob("*.py")):
        assert named(file.read_text()) <= ROWS.keys(), file


@pytest.mark.parametrize("row", ROWS)
def test_the_test_of_a_row_names_it(row: str) -> None:
    assert re.search(rf"(?i)(?<![a-z0-9]){row}(?![0-9a-z])|test_{row}_", (ROOT / ROWS[row]).read_text()), ROWS[row]
