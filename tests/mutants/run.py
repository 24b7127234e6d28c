"""Shows that each mutant is caught: python -m tests.mutants.run [--only inv_03].

A mutant is a unified diff with a first line `caught by: TEST [TEST…]`. Each is applied to a copy of the sources, never
to the working tree, and its tests run there. Caught: the tests pass without the patch and fail with it. Exit code 1 if
one survives, does not apply, or names tests that do not pass by themselves; then pytest's own last lines are shown.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = Path(__file__).resolve().parent
COPIED = ("controlplane", "engine_agent", "trainer_agent", "protos", "tests", "docs", "pyproject.toml", "README.md")
HEADER = "caught by: "
TEST_LIMIT_SECONDS = 120
"""Of one mutant's tests."""
BASELINE_LIMIT_SECONDS = 600
"""Of all the named tests, once and unmutated: they are as many as there are mutants, and take a minute and a half."""
LINES_SHOWN = 20
"""Of pytest's output, where the tests fail without a mutant."""
NO_TESTS_FAILED, TESTS_FAILED = 0, 1
"""pytest's exit codes; any other is a fault of the mutant's header or of the set-up."""


@dataclass(frozen=True, slots=True)
class Mutant:
    path: Path
    tests: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.stem


def load(only: str) -> list[Mutant]:
    """Every mutant whose name begins with `only`. Raises SystemExit if one names no test, or none is named so."""
    found = []
    for path in sorted(MUTANTS.glob("*.patch")):
        header = path.read_text().splitlines()[0]
        if not header.startswith(HEADER):
            raise SystemExit(f"{path.name}: the first line must say `{HEADER}…`")
        found.append(Mutant(path, tuple(header.removeprefix(HEADER).split())))
    chosen = [m for m in found if m.name.startswith(only)]
    if not chosen:
        raise SystemExit(f"no mutant's name begins with {only!r}")
    return chosen


class Copy:
    """The sources in a directory of their own."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.said = ""
        """By the last run of pytest."""
        ignore = shutil.ignore_patterns("__pycache__", "*.pyc")
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, directory / name, ignore=ignore)
            elif source.exists():
                shutil.copy2(source, directory / name)

    def apply(self, mutant: Mutant, *, reverse: bool = False) -> bool:
        """Whether the patch fits."""
        command = ["git", "apply", "-C1", "--recount", *(["--reverse"] if reverse else []), str(mutant.path)]
        return subprocess.run(command, cwd=self._directory, capture_output=True, check=False).returncode == 0

    def test(self, tests: tuple[str, ...], limit_seconds: float) -> int:
        """pytest's exit code, over the copied sources; a time-out counts as failed tests."""
        environment = {**os.environ, "PYTHONPATH": f"{self._directory}:{self._directory / 'protos'}"}
        environment["PYTHONDONTWRITEBYTECODE"] = "1"  # a mutated file can have the same size and second as the old one
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly", *tests]
        try:
            done = subprocess.run(
                command,
                cwd=self._directory,
                env=environment,
                capture_output=True,
                text=True,
                timeout=limit_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            self.said = f"over after {limit_seconds} s"
            return TESTS_FAILED
        self.said = done.stdout + done.stderr
        return done.returncode


def judge(copy: Copy, mutant: Mutant) -> str:
    if not copy.apply(mutant):
        return "DOES NOT APPLY"
    try:
        code = copy.test(mutant.tests, TEST_LIMIT_SECONDS)
    finally:
        copy.apply(mutant, reverse=True)
    if code == TESTS_FAILED:
        return "caught"
    return "SURVIVED" if code == NO_TESTS_FAILED else f"NO TEST (pytest said {code})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.mutants.run", description="Show that each mutant is caught.")
    parser.add_argument("--only", default="", help="those whose names begin so, such as inv_03")
    mutants = load(parser.parse_args().only)
    with tempfile.TemporaryDirectory(prefix="weightplane-mutants-") as directory:
        copy = Copy(Path(directory))
        every = tuple(dict.fromkeys(t for m in mutants for t in m.tests))
        if copy.test(every, BASELINE_LIMIT_SECONDS) != NO_TESTS_FAILED:
            print(*copy.said.splitlines()[-LINES_SHOWN:], sep="\n")
            print(f"The named tests do not pass without any mutant: pytest {' '.join(every)}")
            return 1
        outcomes = {}
        for mutant in mutants:
            outcomes[mutant.name] = judge(copy, mutant)
            print(f"{mutant.name:<40} {outcomes[mutant.name]:<16} {' '.join(mutant.tests)}", flush=True)
    survivors = [name for name, outcome in outcomes.items() if outcome != "caught"]
    print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} mutants caught")
    return 1 if survivors or not outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
