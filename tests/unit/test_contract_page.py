"""The table of the contract in docs/protocol.md: each promise is named in code, attacked by a test, and has mutants."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROWS = re.findall(r"^\| INV-(\d+) \|[^|]*\| ([^|]*) \| ([^|]*) \|$", (ROOT / "docs" / "protocol.md").read_text(), re.M)


def test_the_table_is_read() -> None:
    assert [number for number, _, _ in ROWS] == [str(i) for i in range(1, len(ROWS) + 1)]
    assert len(ROWS) >= 12


@pytest.mark.parametrize(("number", "kept", "attacked"), ROWS)
def test_the_tests_that_a_promise_names_exist(number: str, kept: str, attacked: str) -> None:
    for name in re.findall(r"`([\w/]+\.py)`", attacked):
        assert list((ROOT / "tests").rglob(name)), f"INV-{number} names {name}"


@pytest.mark.parametrize(("number", "kept", "attacked"), ROWS)
def test_code_and_tests_name_each_promise(number: str, kept: str, attacked: str) -> None:
    said = re.compile(rf"INV-{number}(?!\d)|test_inv_?0?{number}_", re.I)
    for directory in ("controlplane", "tests"):
        assert any(said.search(file.read_text()) for file in (ROOT / directory).rglob("*.py")), directory


@pytest.mark.parametrize(("number", "kept", "attacked"), ROWS)
def test_each_promise_has_a_mutant_that_removes_it(number: str, kept: str, attacked: str) -> None:
    assert list((ROOT / "tests" / "mutants").glob(f"inv_{int(number):02}_*.patch")), f"INV-{number}"


def test_each_mutant_of_a_promise_is_of_one_in_the_table() -> None:
    named = {p.name.split("_")[1] for p in (ROOT / "tests" / "mutants").glob("inv_*.patch")}
    assert named <= {f"{int(number):02}" for number, _, _ in ROWS}
