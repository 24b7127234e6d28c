"""Stacks from outside: bounded, and never an error."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from controlplane import stacks


def test_a_process_s_stacks_name_what_it_does() -> None:
    code = "import sys\ndef stands_here():\n    sys.stdin.read()\nprint('on', flush=True)\nstands_here()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()
        [found] = asyncio.run(stacks.dump({"it": process.pid}))
        process.kill()
    if "ermission" in found.problem:
        pytest.skip(f"this machine does not let a process look at another: {found.problem}")
    assert "stands_here" in found.text, found.problem
    assert str(found).startswith(f"it (pid {process.pid}):\n")


def test_one_that_is_gone_is_answered_with_the_problem() -> None:
    process = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    [found] = asyncio.run(stacks.dump({"it": int(process.stdout)}))
    assert found.problem.startswith("py-spy: ")
    assert found.text == ""


async def test_without_py_spy_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_program", lambda: None)
    assert [s.problem for s in await stacks.dump({"it": os.getpid()})] == ["py-spy is not installed"]


async def test_a_look_that_takes_too_long_is_ended_and_many_are_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "py-spy"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setattr(stacks, "_program", lambda: str(slow))
    monkeypatch.setattr(stacks, "DUMP_SECONDS", 0.05)
    found = await stacks.dump({f"{i:02}": 1 for i in range(stacks.MAX_PROCESSES + 1)})
    assert {s.problem for s in found[:-1]} == {"py-spy took longer than 0.05 s"}
    assert found[-1].problem == "not looked at: 33 processes, the limit is 32"


def test_the_arguments_of_a_process_are_not_told() -> None:
    code = "import sys, time; sys.stdout.write('.'); sys.stdout.flush(); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code, "--api-key=s3cret"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(1)
        [found] = asyncio.run(stacks.dump({"it": process.pid}))
        process.kill()
    assert "s3cret" not in str(found)
    assert stacks.without_command("Process 7: python train.py --key=s\nPython v3.11") == "Process 7\nPython v3.11"
