"""A child of an agent ends with it, whatever ends the agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from controlplane.processes import start_time
from engine_agent.lineage import AGENT_PID_VARIABLE, AGENT_START_VARIABLE
from tests.support.eventually import eventually_blocking

CHILD = "import time; from engine_agent.lineage import watch_agent; watch_agent(); print('up', flush=True); "
WAIT = "time.sleep(60)"


def child_of(pid: int, start: int | str | None, code: str = CHILD + WAIT) -> subprocess.Popen[str]:
    tie = {AGENT_PID_VARIABLE: str(pid), AGENT_START_VARIABLE: str(start or "")}
    return subprocess.Popen([sys.executable, "-c", code], env=os.environ | tie, stdout=subprocess.PIPE, text=True)


@pytest.fixture
def agent() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def test_a_killed_agent_takes_its_child_along(agent: subprocess.Popen[bytes]) -> None:
    with child_of(agent.pid, start_time(agent.pid)) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "up\n"
        agent.kill()
        agent.wait()
        eventually_blocking(lambda: child.poll() == -signal.SIGKILL)


def test_a_child_whose_agent_is_gone_already_ends_at_once(agent: subprocess.Popen[bytes]) -> None:
    start = start_time(agent.pid)
    agent.kill()
    agent.wait()
    with child_of(agent.pid, start) as child:
        assert child.wait(60) == -signal.SIGKILL


def test_a_reused_pid_is_not_mistaken_for_the_agent(agent: subprocess.Popen[bytes]) -> None:
    with child_of(agent.pid, "1") as child:
        assert child.wait(60) == -signal.SIGKILL


def test_a_process_without_an_agent_is_left_alone() -> None:
    code = CHILD.replace("'up'", "'done'")
    without = {k: v for k, v in os.environ.items() if k not in (AGENT_PID_VARIABLE, AGENT_START_VARIABLE)}
    subprocess.run([sys.executable, "-c", code], env=without, check=True, timeout=60)


def test_no_process_has_no_start_time() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    assert start_time(ended.pid) is None
