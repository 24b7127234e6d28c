"""`updates`, `why`, `verify`, `watch` and `doctor`, as processes, against a real coordinator and real engine agents."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from controlplane.exit_codes import ExitCode
from tests.support.command_line import weightplane
from tests.support.eventually import eventually
from tests.support.local_fleet import local_fleet
from tests.support.writer import Weights

pytestmark = pytest.mark.timeout(240)
STANDS_SECONDS = 200.0
"""An update that stands still is waited for, for longer than five commands take side by side."""


async def test_what_commands_say_of_a_fleet_is_so(tmp_path: Path) -> None:
    async with local_fleet(tmp_path, stream_idle_seconds=STANDS_SECONDS) as fleet:
        await fleet.push(Weights(), step=7)
        begun = await fleet.begin(8)
        stream = fleet.stream(begun, "e0")
        await stream.until_ready(Weights())

        async def heard() -> bool:
            return any(o.stage for o in (await fleet.view()).updates[0].engines)

        await eventually(heard)
        (code, listed, _), (_, why, _), (good, equal, _), (_, seen, _), (well, looked, _) = await asyncio.gather(
            weightplane(fleet, "updates", "--json"),
            weightplane(fleet, "why", "2", "--stacks"),
            weightplane(fleet, "verify"),
            weightplane(fleet, "watch", "--json", "--count", "1"),
            weightplane(fleet, "doctor", "--json"),
        )
        assert code == ExitCode.OK
        newest, first = json.loads(listed)["updates"]
        assert (newest["phase"], newest["step"], first["phase"], first["step"]) == ("preparing", 8, "committed", 7)
        assert first["seconds_to_decision"] >= first["seconds_to_go"] >= 0
        assert f"update {begun.update_id} of policy, version 1.2: preparing" in why
        assert "e1: nothing has come yet from rank 0 by inline" in why
        assert "e0: " not in why
        assert "e1, " in why, "its processes were asked for"
        assert (good, equal.splitlines()[-1]) == (ExitCode.OK, "2 engines: all equal")
        assert json.loads(seen)["updates"][0]["update_id"] == begun.update_id
        checks = {c["name"]: c for c in json.loads(looked)["checks"]}
        assert (checks["coordinator"]["verdict"], checks["clock"]["verdict"]) == ("good", "good")
        assert checks["engines"]["found"] == "2 are reached at their addresses"
        assert (well == ExitCode.OK) == json.loads(looked)["good"]
        stream.cut()


async def test_watch_takes_a_terminals_screen_and_gives_it_back(tmp_path: Path) -> None:
    async with local_fleet(tmp_path, engines=1) as fleet:
        await fleet.push(Weights())
        screen = await asyncio.to_thread(on_a_terminal, "watch", "--count", "2", "--coordinator", fleet.address)
    assert screen.index("\x1b[?1049h") < screen.index("e0") < screen.rindex("\x1b[?1049l")
    assert "update_decided" in screen


@pytest.mark.slow
async def test_watch_waits_for_a_coordinator_that_is_started_anew(tmp_path: Path) -> None:
    async with local_fleet(tmp_path, engines=1) as fleet:
        command = (sys.executable, "-u", "-m", "controlplane.cli.main", "watch", "--coordinator", fleet.address)
        pipe = asyncio.subprocess.PIPE
        watching = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=asyncio.subprocess.DEVNULL)
        assert watching.stdout is not None
        try:
            await _line_with(watching.stdout, "engine_joined e0")
            await fleet.stop("coordinator")
            await fleet.start_coordinator()
            await _line_with(watching.stdout, "engine_joined e0")
        finally:
            watching.terminate()
            await watching.wait()


async def _line_with(lines: asyncio.StreamReader, text: str) -> None:
    async with asyncio.timeout(60):
        while text not in (line := (await lines.readline()).decode()):
            assert line, "it ended"


def on_a_terminal(*words: str) -> str:
    """All that a command writes to a terminal of 40 lines."""
    command = [sys.executable, "-m", "controlplane.cli.main", *words]
    inside, outside = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "LINES": "40", "COLUMNS": "140"}
    process = subprocess.Popen(command, stdin=outside, stdout=outside, stderr=outside, env=environment)
    os.close(outside)
    written = bytearray()
    with suppress(OSError):  # the other side is closed: the command ended
        while part := os.read(inside, 65536):
            written += part
    os.close(inside)
    assert process.wait(60) == ExitCode.OK
    return written.decode(errors="replace")


@pytest.mark.slow
async def test_verify_fails_where_one_engine_holds_nothing_and_why_refuses_what_is_unknown(tmp_path: Path) -> None:
    async with local_fleet(tmp_path, engines=1) as fleet:
        await fleet.push(Weights())
        fleet.start_engine("late")
        await fleet.wait_for_engines(2)
        (code, text, _), (refused, _, error), (lines, events, _) = await asyncio.gather(
            weightplane(fleet, "verify"),
            weightplane(fleet, "why", "no-such-update"),
            weightplane(fleet, "watch", "--count", "1"),
        )
        assert (code, text.splitlines()[-1]) == (ExitCode.FAILED, "1 of 2 engines differ")
        assert "it holds no version" in text
        assert refused == ExitCode.FAILED
        assert error.startswith("weightplane: no update no-such-update is known")
        assert lines == ExitCode.OK
        assert "update_decided policy: version 1.1 committed" in events


@pytest.mark.slow
async def test_doctor_tries_each_transport_from_where_ranks_run(tmp_path: Path) -> None:
    async with local_fleet(tmp_path) as fleet:
        _, looked, _ = await weightplane(fleet, "doctor", "--link", "--json")
    checks = {c["name"]: c for c in json.loads(looked)["checks"]}
    assert checks["link inline"]["found"].startswith("2 engines answer")
    assert checks["shared memory of engines"]["found"] == "2 of 2 engines share this /dev/shm"
    assert (checks["link shared_memory"]["verdict"], checks["link broadcast"]["verdict"]) == ("good", "note")
