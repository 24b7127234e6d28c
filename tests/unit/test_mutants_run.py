"""What shows that mutants are caught: how long it waits for which tests, and what it refuses to take as shown."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.mutants import run


def test_a_name_of_no_mutant_is_refused_rather_than_all_tests_run() -> None:
    with pytest.raises(SystemExit, match="no mutant"):
        run.load("inv_07_nobody")


def test_all_named_tests_together_are_given_more_time_than_those_of_one_mutant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of pytest's runs here nothing is real but their limits."""
    limits: list[float] = []

    def noted(command: list[str], **how: object) -> subprocess.CompletedProcess[str]:
        if "pytest" in command:
            limits.append(how["timeout"])  # type: ignore[arg-type]
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(run, "COPIED", ())
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", noted)
    monkeypatch.setattr(sys, "argv", ["run", "--only", "inv_07_a_term_is_any_models"])
    assert run.main() == 1, "a mutant that its tests do not notice survives"
    assert limits == [run.BASELINE_LIMIT_SECONDS, run.TEST_LIMIT_SECONDS]
    assert run.BASELINE_LIMIT_SECONDS > 3 * run.TEST_LIMIT_SECONDS
