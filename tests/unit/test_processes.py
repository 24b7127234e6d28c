"""A process that ends with its parent: real processes, since a process is the point."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from controlplane.processes import die_with_parent
from tests.support.eventually import eventually_blocking

PARENT = """
import os, subprocess, sys, threading
child = subprocess.Popen([sys.executable, "-c", {child!r}, str(os.getpid())])
print(child.pid, flush=True)
threading.Event().wait(60)
"""
CHILD = """
import pathlib, signal, sys, threading
from controlplane.processes import die_with_parent
def on_term(number, frame):
    pathlib.Path({mark!r}).write_text("asked to end")
    {then}
signal.signal(signal.SIGTERM, on_term)
die_with_parent(int(sys.argv[1]), grace_seconds=0.2)
pathlib.Path({ready!r}).touch()
while True:
    threading.Event().wait(0.1)
"""


class Family:
    """A parent and its child, which marks when it is asked to end."""

    def __init__(self, directory: Path, then: str) -> None:
        self.mark, ready = directory / "mark", directory / "ready"
        child = textwrap.dedent(CHILD).format(mark=str(self.mark), ready=str(ready), then=then)
        self.parent = subprocess.Popen(
            [sys.executable, "-c", PARENT.format(child=child)], stdout=subprocess.PIPE, text=True
        )
        assert self.parent.stdout is not None
        self.child = psutil.Process(int(self.parent.stdout.readline()))
        eventually_blocking(ready.exists)

    def end(self) -> None:
        for process in (self.parent, self.child):
            if process.poll() is None if isinstance(process, subprocess.Popen) else process.is_running():
                process.kill()
        self.parent.wait(60)


@pytest.fixture
def families() -> Iterator[list[Family]]:
    made: list[Family] = []
    yield made
    for family in made:
        family.end()


def _gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_child_is_asked_to_end_when_its_parent_is_killed(tmp_path: Path, families: list[Family]) -> None:
    families.append(family := Family(tmp_path, "sys.exit(0)"))
    family.parent.send_signal(signal.SIGKILL)

    eventually_blocking(lambda: _gone(family.child))
    assert family.mark.read_text() == "asked to end"


def test_a_child_that_does_not_end_in_time_is_killed(tmp_path: Path, families: list[Family]) -> None:
    families.append(family := Family(tmp_path, "return"))
    family.parent.send_signal(signal.SIGKILL)

    eventually_blocking(lambda: _gone(family.child))
    assert family.mark.exists()


def test_a_child_lives_while_its_parent_does(tmp_path: Path, families: list[Family]) -> None:
    families.append(family := Family(tmp_path, "sys.exit(0)"))
    assert not _gone(family.child)
    assert not family.mark.exists()


def test_a_process_that_is_not_the_parent_is_refused() -> None:
    with pytest.raises(ProcessLookupError, match="not the parent"):
        die_with_parent(os.getpid())


def test_a_parent_that_is_gone_is_refused() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    with pytest.raises(ProcessLookupError, match="not there any more"):
        die_with_parent(ended.pid)
