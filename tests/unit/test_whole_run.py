"""What `make test` proves at its end is proven, or fails: tests/conftest.py, tried over a small tree of tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
MAKEFILE = TESTS.parent / "Makefile"
PLAIN = "def test_something() -> None: pass\n"
MARKED = "import pytest\n\npytestmark = pytest.mark.deploy\n\n\n" + PLAIN
DOUBTFUL = MARKED.replace("deploy", "real")
SETTINGS = """[pytest]
markers =
    real: real
    slow: slow
    pure: pure
    deploy: deploy
"""


def ran(tree: Path, *arguments: str) -> str:
    """What pytest says of a run of the tree's tests."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-vv",
        "--tb=short",
        *arguments,
        "tests",
    ]
    environment = {**os.environ, "PYTHONPATH": f"{TESTS.parent}:{TESTS.parent / 'protos'}"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    return subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, timeout=100, check=False
    ).stdout


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A module of each place and the whole run's own test; one module is marked as `make test-deploy`'s."""
    (tmp_path / "pytest.ini").write_text(SETTINGS)
    modules = {"unit/test_pure.py": PLAIN, "integration/test_rest.py": PLAIN, "deploy/test_booted.py": MARKED}
    for name, text in modules.items():
        (tmp_path / "tests" / name).parent.mkdir(parents=True)
        (tmp_path / "tests" / name).write_text(text)
    (tmp_path / "tests/__init__.py").touch()
    (tmp_path / "tests/support").mkdir()
    for name in ("conftest.py", "test_reasons.py", "support/__init__.py", "support/engine_starts.py"):
        shutil.copy2(TESTS / name, tmp_path / "tests" / name)
    return tmp_path


def test_the_last_part_of_a_whole_run_proves_that_each_reason_is_produced(tree: Path) -> None:
    """Nothing in this tree produces any, or starts an engine: both proofs must come, and fail for that alone."""
    said = ran(tree, "--reasons", "reasons.json", "-m", "not slow and not deploy")
    assert "2 failed, 2 passed, 1 deselected" in said
    assert "STALE_TERM" in said
    assert "leaves these out" not in said


def test_a_whole_run_that_leaves_a_module_out_fails_and_names_it(tree: Path) -> None:
    (tree / "tests/integration/test_forgotten.py").write_text(DOUBTFUL)
    said = ran(tree, "--reasons", "reasons.json", "-m", "not real and not deploy")
    assert "nothing is proven by a run that leaves these out" in said
    assert "test_forgotten.py" in said


def test_a_run_of_a_part_proves_nothing_and_says_nothing(tree: Path) -> None:
    assert "1 passed, 4 deselected" in ran(tree, "-k", "test_pure")


def test_make_test_leaves_out_only_what_the_proof_excuses() -> None:
    rest = next(line for line in MAKEFILE.read_text().splitlines() if line.startswith("TEST_REST"))
    assert '-m "not pure and not slow and not deploy" tests' in rest
