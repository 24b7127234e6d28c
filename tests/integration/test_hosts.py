"""A fleet over several hosts that are cut off from one another, hear each other one way only, or are far apart.

Network namespaces with addresses of their own, real daemons in them. Nobody helps: agents and coordinator agree again
by themselves, and at no time is a version served under another's name.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.eventually import eventually_blocking
from tests.support.hosts import WHY_NOT, Host, hosts
from tests.support.toy_rank import SHAPES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]
TOY = Path(__file__).parents[1] / "support" / "toy_rank.py"
TENSORS = SHAPES | {"tied": SHAPES["embed"]}
SECONDS = 60.0
LOOKS = 8
NOTICED_SECONDS = 25.0
"""A cut link is noticed by silence: the lease's 5 s, and what a busy machine adds."""


class Fleet:
    """Coordinator, two engines and a trainer that pushes once a second, each on a host of its own."""

    def __init__(self, directory: Path, on: dict[str, Host], stack: ExitStack) -> None:
        self.on = on
        self._directory = directory
        self._stack = stack
        self.address = f"{on['coordinator'].address}:7070"

    def start(self, engine_b_coordinator: str = "") -> None:
        self.daemon(
            "coordinator",
            *("coordinator", "--set", f"listen={self.address}", "--set", "state_dir=coordinator"),
            *("--set", "transport=inline", "--set", "lease_ttl_seconds=5", "--set", "run_id=hosts"),
        )
        for name in ("engine-a", "engine-b"):
            coordinator = engine_b_coordinator if name == "engine-b" and engine_b_coordinator else self.address
            self._engine(name, coordinator)
        eventually_blocking(lambda: len(self.engines()) == 2, within=SECONDS)
        script = json.dumps({"steps": 100_000, "pause_before_step": 0.5, "push_timeout": 30})
        self.daemon(
            "trainer",
            *("trainer", "--set", f"coordinator={self.address}", "--set", "checkpoint_root=checkpoints"),
            *("--set", f"listen={self.on['trainer'].address}:7272", "--", str(TOY), script),
        )
        self.settles()

    def daemon(self, host: str, command: str, *words: str) -> None:
        log = self._stack.enter_context((self._directory / f"{host}-{command}.log").open("w"))
        own = [sys.executable, "-m", "controlplane.cli.main", command, "--set", "insecure=true"]
        self._run(host, [*own, "--die-with-parent", str(os.getpid()), *words], log)

    def link(self, host: str, listen: str, target: str, latency: float, bytes_per_second: float) -> None:
        words = ["-m", "tests.support.slow_link", listen, target, str(latency), str(bytes_per_second)]
        self._run(host, [sys.executable, *words], subprocess.DEVNULL)

    def _run(self, host: str, command: list[str], log: Any) -> None:
        process = subprocess.Popen(
            self.on[host].inside(*command), cwd=self._directory, stdout=log, stderr=log, env=os.environ | PATHS
        )
        self._stack.callback(_end, process)

    def _engine(self, name: str, coordinator: str) -> None:
        shapes = ", ".join(f'"{n}" = {list(shape)}' for n, shape in TENSORS.items())
        self.daemon(
            name,
            *("engine", "--set", f"engine_id={name}", "--set", f"coordinator={coordinator}"),
            *("--set", f"listen={self.on[name].address}:7171", "--set", "state_dir=engines"),
            *("--set", "backend=memory", "--set", f"memory.tensors={{ {shapes} }}", "--set", "run_id=hosts"),
            *("--set", "checkpoint_root=checkpoints", "--set", "stream_idle_seconds=5"),
        )

    # ---- what the coordinator says ----

    def engines(self) -> dict[str, dict[str, Any]]:
        own = [sys.executable, "-m", "controlplane.cli.main", "engines", "--json", "--coordinator", self.address]
        said = subprocess.run(
            self.on["coordinator"].inside(*own), capture_output=True, text=True, timeout=30, check=False
        ).stdout
        return {e["engine"]: e for e in json.loads(said)["engines"]} if said else {}

    def number(self, engine: str) -> int:
        """That it is routable for; 0: it is not."""
        found = self.engines().get(engine, {})
        return int(found["applied"].partition(".")[2]) if found.get("routable") and found.get("applied") else 0

    def settles(self) -> None:
        """Both engines are routable, and go on being brought what is pushed."""
        for engine in ("engine-a", "engine-b"):
            self.is_past(engine, 0)
            self.is_past(engine, self.number(engine))

    def is_past(self, engine: str, number: int) -> None:
        eventually_blocking(lambda: self.number(engine) > number, within=SECONDS)

    def goes_on_without(self, engine: str, other: str) -> None:
        eventually_blocking(lambda: self.number(engine) == 0, within=NOTICED_SECONDS)
        self.is_past(other, max(self.number(other), 1))


PATHS = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (TOY.parents[2], TOY.parents[2] / "protos")))}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextmanager
def fleet_of_hosts(directory: Path) -> Iterator[Fleet]:
    with hosts("coordinator", "engine-a", "engine-b", "trainer") as made, ExitStack() as stack:
        yield Fleet(directory, {host.name: host for host in made}, stack)


def cut(fleet: Fleet) -> None:
    fleet.on["engine-b"].unplug()


def mend(fleet: Fleet) -> None:
    fleet.on["engine-b"].plug_in()


def silence(fleet: Fleet) -> None:
    fleet.on["engine-b"].lose_what_is_sent_to(fleet.on["coordinator"])


def speak(fleet: Fleet) -> None:
    fleet.on["engine-b"].send_to(fleet.on["coordinator"])


def deafen(fleet: Fleet) -> None:
    fleet.on["coordinator"].lose_what_is_sent_to(fleet.on["engine-b"])


def hear(fleet: Fleet) -> None:
    fleet.on["coordinator"].send_to(fleet.on["engine-b"])


@pytest.mark.parametrize(
    ("breaks", "heals"),
    [(cut, mend), (silence, speak), (deafen, hear)],
    ids=["an engine's host is cut off", "an engine is not heard", "an engine does not hear"],
)
def test_inv10_a_host_that_is_lost_is_not_routed_to_and_comes_back_by_itself(
    breaks: Callable[[Fleet], None], heals: Callable[[Fleet], None], tmp_path: Path
) -> None:
    with fleet_of_hosts(tmp_path) as fleet:
        fleet.start()
        breaks(fleet)
        fleet.goes_on_without("engine-b", "engine-a")
        heals(fleet)
        fleet.settles()


def test_inv4_an_engine_that_its_trainer_cannot_reach_keeps_what_it_holds(tmp_path: Path) -> None:
    with fleet_of_hosts(tmp_path) as fleet:
        fleet.start()
        fleet.on["trainer"].lose_what_is_sent_to(fleet.on["engine-b"])
        seen = [fleet.engines()["engine-b"] for _ in range(LOOKS)]  # pushes come and fail meanwhile
        assert all(engine["known"] and engine["applied"] for engine in seen), seen
        assert "poisoned" not in {engine["state"] for engine in seen}
        fleet.on["trainer"].send_to(fleet.on["engine-b"])
        fleet.settles()


def test_inv7_a_trainer_that_is_cut_off_pushes_on_when_it_is_back(tmp_path: Path) -> None:
    with fleet_of_hosts(tmp_path) as fleet:
        fleet.start()
        fleet.on["trainer"].unplug()
        for engine in ("engine-a", "engine-b"):
            fleet.is_past(engine, 0)  # they serve on what they hold
        fleet.on["trainer"].plug_in()
        fleet.settles()


def test_an_engine_behind_a_slow_link_keeps_up(tmp_path: Path) -> None:
    """200 ms each way and 400 kB/s between its agent and the coordinator."""
    with fleet_of_hosts(tmp_path) as fleet:
        behind = f"{fleet.on['engine-b'].address}:7070"
        fleet.link("engine-b", behind, fleet.address, latency=0.2, bytes_per_second=400_000)
        fleet.start(engine_b_coordinator=behind)
        fleet.settles()
