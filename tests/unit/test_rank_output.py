"""What ranks write is passed on as it is, and its end is kept: `RankOutput`, and the directories it lies in."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.processes import start_time
from tests.support.eventually import PATIENCE_SECONDS, eventually_blocking
from trainer_agent import directories
from trainer_agent.agent.output import DIRECTORY_VARIABLE, MAX_LINE_BYTES, MAX_LINES, Line, RankOutput, wrapped


@pytest.fixture
def output(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[RankOutput]:
    """Its end waits for all that was written, however busy the machine is."""
    monkeypatch.setattr("trainer_agent.agent.output.STOP_SECONDS", PATIENCE_SECONDS)
    made = RankOutput(tmp_path, 2)
    yield made
    made.close()


def run(output: RankOutput, rank: int, code: str) -> None:
    """As torch's launcher runs a rank."""
    shell, *rest = wrapped(["-c", code])[1:]
    environment = {**os.environ, DIRECTORY_VARIABLE: str(output.directory), "LOCAL_RANK": str(rank)}
    subprocess.run([shell, *rest], check=True, env=environment)


def test_output_and_errors_are_passed_on_and_kept_by_rank(
    output: RankOutput, capfd: pytest.CaptureFixture[str]
) -> None:
    run(output, 0, "import sys; print('one'); print('two', file=sys.stderr)")
    run(output, 1, "print('three')")
    eventually_blocking(lambda: len(output.tail(0, 9) or []) == 2 and output.tail(1, 9))
    assert set(output.tail(0, 9) or []) == {Line("one", error=False), Line("two", error=True)}
    assert output.tail(1, 9) == [Line("three", error=False)]
    assert output.tail(2, 9) is None
    output.close()
    out, error = capfd.readouterr()
    assert sorted(out.splitlines()) == ["one", "three"]
    assert error == "two\n"


def test_more_than_a_pipe_holds_comes_through_whole_and_what_is_kept_is_bounded(
    output: RankOutput, capfd: pytest.CaptureFixture[str]
) -> None:
    run(output, 0, "for i in range(20000): print(i, 'x' * 20)\nprint('y' * 100_000)")
    output.close()
    out = capfd.readouterr().out.splitlines()
    assert out == [f"{i} {'x' * 20}" for i in range(20000)] + ["y" * 100_000]
    kept = output.tail(0, 5000) or []
    assert len(kept) == MAX_LINES
    assert kept[-1].text == "y" * MAX_LINE_BYTES
    assert [line.text for line in output.tail(0, 2) or []] == [f"19999 {'x' * 20}", "y" * MAX_LINE_BYTES]


def test_a_line_without_an_end_is_passed_on_soon(output: RankOutput, capfd: pytest.CaptureFixture[str]) -> None:
    run(output, 0, "print('50 %', end='\\r')")
    seen: list[str] = []

    def passed_on() -> bool:
        seen.append(capfd.readouterr().out)
        return "".join(seen) == "50 %\r"

    eventually_blocking(passed_on)


def test_directories_of_the_dead_are_swept_and_those_of_the_living_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = directories.private_directory()
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    here = os.stat("/proc/self/ns/pid").st_ino
    dead = tmp_path / f"weightplane-ns{here}-{int(gone.stdout)}-17-abc"
    again = tmp_path / f"weightplane-ns{here}-{os.getpid()}-{(start_time(os.getpid()) or 0) - 1}-abc"
    contained = tmp_path / f"weightplane-ns{here + 1}-{int(gone.stdout)}-17-abc"
    for directory in (dead, again, contained, tmp_path / "weightplane-of-somebody"):
        directory.mkdir()
    assert sorted(directories.sweep()) == sorted([dead, again])
    left = [mine.name, contained.name, "weightplane-of-somebody"]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(left)
