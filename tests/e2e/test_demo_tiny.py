"""`weightplane demo --model tiny`: the main job on real parts, and that nothing is left of it, however it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from controlplane.exit_codes import ExitCode
from tests.support.eventually import eventually_blocking

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

STEPS = 5
DEMO_SECONDS = 420
"""It takes about 75 s on two idle cores; a machine that does other things meanwhile is given more."""
START_SECONDS = 90
END_SECONDS = 60
MARK_VARIABLE = "WEIGHTPLANE_TEST_MARK"
PSS_LIMIT_MIB = 8 * 1024


class Demo:
    """One demo as a process, with temporary files of its own and a mark that everything below it inherits."""

    def __init__(self, *options: str) -> None:
        self.mark = uuid.uuid4().hex
        # A short path: sockets lie below it, and their names may have 107 characters.
        self.scratch = Path(tempfile.mkdtemp(prefix="wp-"))
        self.temporary = self.scratch / "tmp"
        self.temporary.mkdir()
        self.said = self.scratch / "said"
        command = [sys.executable, "-m", "controlplane.cli.main", "demo", "--model", "tiny", "--listen", "127.0.0.1:0"]
        with self.said.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*command, "--json", "--cache", str(self.scratch / "models"), *options],
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=os.environ | {"TMPDIR": str(self.temporary), MARK_VARIABLE: self.mark},
                start_new_session=True,
            )

    def processes(self) -> list[int]:
        """What runs of it, the demo itself included."""
        wanted = f"{MARK_VARIABLE}={self.mark}".encode()
        return [pid for pid in _pids() if wanted in _environment(pid)]

    @property
    def address(self) -> str | None:
        """Where its coordinator serves, once it said so."""
        found = re.search(r"the coordinator serves at (\S+):", self.said.read_text())
        return found[1] if found else None

    def wait_for_engines(self) -> None:
        """Until both agents and vLLM's own processes below them run."""
        commands = [b"controlplane.cli.main\0engine", b"multiprocessing"]
        eventually_blocking(
            lambda: all(sum(c in _command(pid) for pid in self.processes()) >= 2 for c in commands),
            within=START_SECONDS,
        )

    def close(self) -> None:
        self.process.kill()
        self.process.wait(END_SECONDS)
        with suppress(AssertionError):
            eventually_blocking(lambda: self.processes() == [], within=END_SECONDS)
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.scratch)


@pytest.fixture
def demos() -> Iterator[list[Demo]]:
    made: list[Demo] = []
    yield made
    for demo in made:
        demo.close()


def assert_nothing_left(demo: Demo, shared_memory_before: set[str]) -> None:
    assert demo.processes() == []
    assert list(demo.temporary.iterdir()) == []
    assert _shared_memory() <= shared_memory_before
    assert demo.address is None or not _answers(demo.address)


def test_five_steps_reach_both_engines_and_are_verified(demos: list[Demo]) -> None:
    before = _shared_memory()
    demos.append(demo := Demo("--steps", str(STEPS), "--verify"))
    output, _ = demo.process.communicate(timeout=DEMO_SECONDS)

    assert demo.process.returncode == ExitCode.OK, demo.said.read_text()
    lines = output.decode().splitlines()
    assert len(lines) == 1, "stdout has the JSON line and nothing else"
    result = json.loads(lines[0])
    last = {"term": 1, "number": STEPS + 1}
    assert result["steps"] == STEPS
    assert result["fleet_version"] == last
    assert result["versions"] == {"engine-0": last, "engine-1": last}
    assert result["verified"] is True
    assert 0 <= result["reward_first"] <= 1
    assert 0 <= result["reward_last"] <= 1
    assert 0 < result["update_seconds_median"] < DEMO_SECONDS
    assert 0 < result["pss_peak_mib"] < PSS_LIMIT_MIB
    assert_nothing_left(demo, before)


@pytest.mark.slow
def test_ctrl_c_ends_every_part_and_leaves_nothing(demos: list[Demo]) -> None:
    before = _shared_memory()
    demos.append(demo := Demo("--steps", str(STEPS)))
    demo.wait_for_engines()
    demo.process.send_signal(signal.SIGINT)

    output, _ = demo.process.communicate(timeout=END_SECONDS)
    assert demo.process.returncode == ExitCode.INTERRUPTED, demo.said.read_text()
    assert output == b""
    assert_nothing_left(demo, before)


@pytest.mark.slow
def test_a_part_that_dies_ends_the_demo_with_its_name_and_leaves_nothing(demos: list[Demo]) -> None:
    before = _shared_memory()
    demos.append(demo := Demo("--steps", str(STEPS)))
    demo.wait_for_engines()
    coordinator = next(p for p in demo.processes() if b"controlplane.cli.main\0coordinator" in _command(p))
    os.kill(coordinator, signal.SIGKILL)

    demo.process.communicate(timeout=END_SECONDS)
    assert demo.process.returncode == ExitCode.FAILED
    assert "coordinator ended with signal 9" in demo.said.read_text()
    assert_nothing_left(demo, before)


@pytest.mark.slow
def test_every_process_ends_with_a_demo_that_is_killed(demos: list[Demo]) -> None:
    demos.append(demo := Demo("--steps", str(STEPS)))
    demo.wait_for_engines()
    demo.process.kill()
    demo.process.wait(END_SECONDS)

    eventually_blocking(lambda: demo.processes() == [], within=END_SECONDS)


def _pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _environment(pid: int) -> list[bytes]:
    """Empty for a process that is gone, a zombie too."""
    return _read(pid, "environ").split(b"\0")


def _command(pid: int) -> bytes:
    return _read(pid, "cmdline")


def _read(pid: int, name: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def _shared_memory() -> set[str]:
    return {segment.name for segment in Path("/dev/shm").glob("weightplane-demo-*")}


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with socket.socket() as attempt:
        return attempt.connect_ex((host, int(port))) == 0
