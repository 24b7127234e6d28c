"""The units of deploy/systemd under a booted systemd: start, READY, kill -9 and catch-up, watchdog, stop, fencing.

`make test-deploy` runs them. Engines are in memory; daemons, ranks, sockets, checkpoints and systemd are real.
"""

from __future__ import annotations

import re
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from controlplane.exit_codes import ExitCode
from engine_agent.daemon.settings import EngineSettings
from tests.deploy.machine import REPOSITORY, Machine, booted, missing
from tests.support.eventually import eventually_blocking
from tests.support.toy_rank import SHAPES

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]

ENGINES = ("weightplane-engine@policy-0", "weightplane-engine@policy-1")
COORDINATOR = "weightplane-coordinator"
TRAINER = "weightplane-trainer@policy"
UNITS = (COORDINATOR, *ENGINES, TRAINER, "weightplane-trainer@other")
FLEET = """
run_id = "deployed"
address = "127.0.0.1:7070"
state_dir = "/var/lib/weightplane"
checkpoint_root = "/var/lib/weightplane/checkpoints"
[engine]
backend = "memory"
[engine.memory]
seconds_per_token = 0.05
tensors = { SHAPES }
[[groups]]
name = "policy"
count = 2
[[trainers]]
name = "policy"
script = "train.py"
[[trainers]]
name = "other"
script = "train.py"
settings = { takeover = true }
"""
TRAIN = """
import sys
sys.argv[1:] = ['{"steps": 100000, "pause_before_step": 1.0}']
from tests.support.toy_rank import main
main()
"""
PATHS = "PYTHONPATH=/srv/weightplane:/srv/weightplane/protos:/srv/site-packages"
SAMPLE = """
import asyncio, sys
from weightplane import RolloutClient, SamplingSettings
async def main():
    async with RolloutClient("127.0.0.1:7070") as rollouts:
        tokens = 0
        async for delta in rollouts.stream([1, 2, 3], SamplingSettings(max_tokens=int(sys.argv[1]))):
            if not tokens:
                print(delta.engine_id, flush=True)
            tokens += len(delta.tokens)
        print(delta.ending.finish_reason, tokens)
asyncio.run(main())
"""
FAILPOINTS = "/var/lib/weightplane/failpoints"
WEDGED_AT = {ENGINES[0]: "engine.between_chunks", COORDINATOR: "coordinator.before_decision"}
WATCHED = f"[Service]\nWatchdogSec=4\nTimeoutAbortSec=2\nEnvironment=WEIGHTPLANE_FAILPOINTS_DIR={FAILPOINTS}\n"
SECONDS = 60.0
TENSORS = SHAPES | {"tied": SHAPES["embed"]}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with booted(tmp_path_factory.mktemp("machine")) as machine:
        for unit in (REPOSITORY / "deploy" / "systemd").glob("*.service"):
            machine.write(f"/etc/systemd/system/{unit.name}", unit.read_text())
        shapes = ", ".join(f'"{name}" = {list(shape)}' for name, shape in TENSORS.items())
        machine.write("/etc/weightplane/fleet.toml", FLEET.replace("SHAPES", shapes))
        machine.write("/etc/weightplane/train.py", TRAIN)
        machine.write("/etc/weightplane/sample.py", SAMPLE)
        yield machine


@pytest.fixture
def fleet(machine: Machine) -> Iterator[Machine]:
    """Coordinator, two engines and a trainer that pushes for ever, all serving; a new state for each test."""
    machine.run("systemctl", "daemon-reload")
    machine.run("install", "-d", "-o", "weightplane", FAILPOINTS)
    machine.run("systemctl", "start", COORDINATOR, *ENGINES, TRAINER, timeout=90)
    eventually_blocking(lambda: all(number(machine, engine) for engine in ENGINES), within=SECONDS)
    yield machine
    machine.run("systemctl", "stop", *UNITS, timeout=120)
    machine.run("systemctl", "reset-failed", *UNITS, check=False)
    machine.run("sh", "-c", "rm -rf /var/lib/weightplane/* /run/systemd/system/*.d")


def status(machine: Machine, unit: str) -> str:
    return machine.show(unit, "StatusText")["StatusText"]


def number(machine: Machine, engine: str) -> int:
    """Of the version that an engine serves, as its unit says; 0: it serves none."""
    found = re.match(r"serving, policy \d+\.(\d+)", status(machine, engine))
    return int(found[1]) if found else 0


def main_pid(machine: Machine, unit: str) -> int:
    return int(machine.show(unit, "MainPID")["MainPID"])


def told(*lines: str) -> None:
    """What `make test-deploy -s` shows."""
    print(textwrap.indent("\n".join(lines), "  "))


def test_the_units_are_ready_and_say_what_they_serve(fleet: Machine) -> None:
    eventually_blocking(lambda: "2 of 2 engines routable" in status(fleet, COORDINATOR), within=SECONDS)
    shown = {unit: fleet.show(unit, "ActiveState", "Type", "StatusText") for unit in (COORDINATOR, *ENGINES, TRAINER)}
    told(*(f"{unit}: {values['StatusText']}" for unit, values in shown.items()))
    assert {values["ActiveState"] for values in shown.values()} == {"active"}
    assert "policy 1." in shown[COORDINATOR]["StatusText"]
    for_people = fleet.run("systemctl", "status", "--no-pager", ENGINES[0])
    assert re.search(r'Status: "serving, policy 1\.\d+; incarnation \d+, at 127\.0\.0\.1:\d+"', for_people), for_people
    owner = fleet.run("stat", "-c", "%U", "/var/lib/weightplane/coordinator/ledger.sqlite")
    assert owner == "weightplane"


def test_inv10_an_agent_killed_by_kill_9_is_restarted_and_catches_up_without_a_trainer(fleet: Machine) -> None:
    eventually_blocking(lambda: fleet.run("ls", "/var/lib/weightplane/checkpoints", check=False) != "", within=SECONDS)
    fleet.run("systemctl", "stop", TRAINER, timeout=120)
    served = number(fleet, ENGINES[1])
    fleet.run("kill", "-9", str(main_pid(fleet, ENGINES[0])))
    eventually_blocking(lambda: fleet.show(ENGINES[0], "NRestarts")["NRestarts"] == "1", within=SECONDS)
    eventually_blocking(lambda: number(fleet, ENGINES[0]) == served, within=SECONDS)
    told(f"{ENGINES[0]}: killed, started again: {status(fleet, ENGINES[0])}")


@pytest.mark.parametrize("point", ["", "loop"])
@pytest.mark.parametrize("unit", [ENGINES[0], COORDINATOR])
def test_the_watchdog_ends_a_daemon_that_hangs(fleet: Machine, unit: str, point: str) -> None:
    """The whole process is stopped; or its event loop alone stands still, in the middle of an update, while every other
    thread goes on, gRPC's too: nobody but the loop may feed the watchdog."""
    fleet.run("mkdir", "-p", f"/run/systemd/system/{unit}.service.d")
    fleet.run("sh", "-c", f"printf '{WATCHED}' > /run/systemd/system/{unit}.service.d/watched.conf")
    fleet.run("systemctl", "daemon-reload")
    fleet.run("systemctl", "restart", unit)
    eventually_blocking(lambda: all(number(fleet, engine) for engine in ENGINES), within=SECONDS)
    if point:
        wedge(fleet, unit)
    else:
        fleet.run("kill", "-STOP", str(main_pid(fleet, unit)))
    eventually_blocking(lambda: fleet.show(unit, "NRestarts")["NRestarts"] == "1", within=SECONDS)
    eventually_blocking(lambda: fleet.show(unit, "ActiveState")["ActiveState"] == "active", within=SECONDS)
    eventually_blocking(lambda: all(number(fleet, engine) for engine in ENGINES), within=SECONDS)
    said = fleet.run("journalctl", "-u", unit, "--no-pager", "-o", "cat")
    assert "Watchdog timeout" in said
    how = "its event loop stood still" if point else "stopped"
    told(f"{unit}: {how}, killed by the watchdog, started again: {status(fleet, unit)}")


def wedge(machine: Machine, unit: str) -> None:
    """At the next update a blocking call holds the daemon's event loop for good. Every thread but that one turns."""
    pid = main_pid(machine, unit)
    machine.run("sh", "-c", f"echo 'sleep=600' > {FAILPOINTS}/{WEDGED_AT[unit]}")
    eventually_blocking(lambda: machine.run("ls", FAILPOINTS) == "", within=SECONDS)  # it is taken as it fires
    state = machine.run("sh", "-c", f"grep State /proc/{pid}/status || true")
    assert "T (stopped)" not in state


def test_a_stop_lets_the_requests_of_an_engine_finish(fleet: Machine) -> None:
    fleet.run("systemctl", "stop", TRAINER, timeout=120)  # no update comes between
    sampling = fleet.start("env", PATHS, "python3", "/etc/weightplane/sample.py", "100")
    assert sampling.stdout is not None
    chosen = f"weightplane-engine@{sampling.stdout.readline().strip()}"
    fleet.run("systemctl", "stop", chosen, timeout=90)
    said = sampling.communicate(timeout=30)[0].strip()
    told(f"{chosen}: stopped; the request in it ended: {said} tokens")
    assert said == "length 100"
    assert fleet.show(chosen, "Result", "ActiveState") == {"Result": "success", "ActiveState": "inactive"}


def test_a_stop_waits_no_longer_than_it_said_and_nobody_is_killed(fleet: Machine) -> None:
    """A request that outlasts stop_drain_seconds: the agent ends by itself, before TimeoutStopSec would end it."""
    fleet.run("systemctl", "stop", TRAINER, timeout=120)
    sampling = fleet.start("env", PATHS, "python3", "/etc/weightplane/sample.py", "2000")
    assert sampling.stdout is not None
    chosen = f"weightplane-engine@{sampling.stdout.readline().strip()}"
    began = time.monotonic()
    fleet.run("systemctl", "stop", chosen, timeout=90)
    seconds = time.monotonic() - began
    sampling.kill()
    shown = fleet.show(chosen, "Result", "ActiveState", "TimeoutStopUSec", "ExecMainStatus")
    told(f"{chosen}: stopped in the middle of a long request after {seconds:.0f} s: {shown}")
    assert shown["TimeoutStopUSec"] == "1min"
    assert (shown["Result"], shown["ActiveState"]) == ("success", "inactive")
    assert EngineSettings.stop_drain_seconds <= seconds < 60


def test_inv7_a_trainer_that_was_fenced_is_not_started_again(fleet: Machine) -> None:
    fleet.run("systemctl", "start", "weightplane-trainer@other", timeout=90)
    eventually_blocking(lambda: fleet.show(TRAINER, "ActiveState")["ActiveState"] == "failed", within=SECONDS)
    shown = fleet.show(TRAINER, "ExecMainStatus", "NRestarts", "Result")
    assert shown == {"ExecMainStatus": str(int(ExitCode.FENCED)), "NRestarts": "0", "Result": "exit-code"}
    eventually_blocking(lambda: "policy 2." in status(fleet, COORDINATOR), within=SECONDS)
    told(f"{TRAINER}: fenced, {shown}; the other one pushes: {status(fleet, COORDINATOR)}")


def test_the_coordinators_unit_takes_away_what_it_does_not_need(machine: Machine) -> None:
    said = machine.run("systemd-analyze", "security", "--no-pager", f"{COORDINATOR}.service")
    exposure = re.search(r"Overall exposure level for .*: ([\d.]+)", said)
    assert exposure is not None, said
    told(exposure[0])
    assert float(exposure[1]) < 3.0, said


def test_the_machine_runs_this_checkout(machine: Machine) -> None:
    assert Path(REPOSITORY / "README.md").read_text() == (machine.run("cat", "/srv/weightplane/README.md") + "\n")
