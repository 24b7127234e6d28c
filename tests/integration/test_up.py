"""`weightplane up` with real processes: it starts a fleet file, keeps it running, and leaves nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from controlplane.exit_codes import ExitCode
from tests.support.eventually import eventually_blocking
from tests.support.ports import free_port
from tests.support.toy_rank import SHAPES

SECONDS = 100.0


@contextmanager
def running(directory: Path, groups: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    address = f"127.0.0.1:{free_port()}"
    file = directory / "fleet.toml"
    file.write_text(f'run_id = "up"\naddress = "{address}"\n[engine]\nbackend = "memory"\n{groups}')
    with (directory / "said.txt").open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "controlplane.cli.main", "up", str(file)],
            stderr=said,
            text=True,
            start_new_session=True,
            cwd=directory,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
    try:
        yield process, address
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def said(directory: Path) -> str:
    return (directory / "said.txt").read_text()


def pid_of(directory: Path, name: str) -> int | None:
    """The newest."""
    found = re.findall(rf"^{name}: started, pid (\d+)", said(directory), re.MULTILINE)
    return int(found[-1]) if found else None


def states(address: str) -> dict[str, str]:
    """Each engine's word in the table of `weightplane status`."""
    words = [sys.executable, "-m", "controlplane.cli.main", "status", "--coordinator", address]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False).stdout
    return dict(re.findall(r"^([a-z]+-\d+) +(\w+)", shown, re.MULTILINE))


def until(what: Callable[[], bool], within: float = SECONDS) -> None:
    eventually_blocking(what, within=within)


def test_a_fleet_file_runs_heals_and_ends_without_a_trace(tmp_path: Path) -> None:
    groups = '[[groups]]\nname = "p"\n[[groups]]\nname = "t"\nmodel = "teacher"\nrole = "frozen"\n'
    with running(tmp_path, groups) as (process, address):
        until(lambda: states(address) == {"p-0": "empty", "t-0": "serving"})
        first = pid_of(tmp_path, "t-0")
        assert first is not None
        os.kill(first, signal.SIGKILL)
        until(lambda: pid_of(tmp_path, "t-0") not in (None, first))
        until(lambda: states(address) == {"p-0": "empty", "t-0": "serving"})
        pids = [pid_of(tmp_path, name) for name in ("coordinator", "p-0", "t-0")]
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == ExitCode.INTERRUPTED
    assert not [pid for pid in pids if pid is not None and Path(f"/proc/{pid}").exists()]
    assert {p.name for p in (tmp_path / "weightplane-state/logs").iterdir()} == {
        "coordinator.log",
        "p-0.log",
        "t-0.log",
    }


def test_a_fleet_file_with_a_trainer_serves_what_it_pushes(tmp_path: Path) -> None:
    shapes = ", ".join(f'"{name}" = {list(shape)}' for name, shape in (SHAPES | {"tied": SHAPES["embed"]}).items())
    (tmp_path / "train.py").write_text("from tests.support.toy_rank import main\nmain()\n")
    groups = (
        f'memory.tensors = {{ {shapes} }}\n[[groups]]\nname = "p"\n[[trainers]]\nname = "policy"\n'
        """script = "train.py"\narguments = ['{"steps": 1}']\nbeside = ["p-0"]\n"""
    )
    with running(tmp_path, groups) as (process, address):
        until(lambda: "policy: not started again" in said(tmp_path), within=200.0)
        assert "policy ended with code 0" in said(tmp_path)
        until(lambda: states(address) == {"p-0": "serving"})
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == ExitCode.INTERRUPTED


def test_what_would_end_the_same_again_is_not_started_again(tmp_path: Path) -> None:
    """An engine that its coordinator refuses: a second frozen engine of the model with other weights."""
    groups = (
        '[[groups]]\nname = "t"\nmodel = "teacher"\nrole = "frozen"\n'
        '[[groups]]\nname = "u"\nmodel = "teacher"\nrole = "frozen"\nengine = {memory = {seed = 1}}\n'
    )
    with running(tmp_path, groups) as (process, address):
        until(lambda: "a restart would not help" in said(tmp_path))
        until(lambda: "serving" in states(address).values())
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == ExitCode.INTERRUPTED
    assert "VERSION_CONFLICT" in said(tmp_path)


def test_a_fleet_whose_port_is_taken_starts_no_engine_and_ends(tmp_path: Path) -> None:
    with running(tmp_path, "") as (_, address):
        until(lambda: "coordinator serves" in said(tmp_path))
        second = tmp_path / "second"
        second.mkdir()
        file = second / "fleet.toml"
        file.write_text(f'address = "{address}"\n[engine]\nbackend = "memory"\n[[groups]]\nname = "p"\n')
        words = [sys.executable, "-m", "controlplane.cli.main", "up", str(file)]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert ended.returncode == ExitCode.FAILED
    assert f"coordinator ended with code {ExitCode.PORT_IN_USE:d}" in ended.stderr
    assert "p-0" not in ended.stderr
