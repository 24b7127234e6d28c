"""A fleet over several hosts that are cut off from one another, hear each other one way only, or are far apart.

Network namespaces with addresses of their own, real daemons in them. Nobody helps: agents and coordinator agree again
by themselves, and at no time is a version served under another's name: an observer on each engine's own host, which no
cut keeps from it, holds what the engine claims and the tokens that it makes against what the weights really are.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from controlplane.exit_codes import ExitCode
from tests.kill_matrix.observer import RUN, LogTail
from tests.kill_matrix.truth import VOCABULARY
from tests.support.eventually import eventually_blocking
from tests.support.hosts import WHY_NOT, Host, hosts
from tests.support.toy_rank import SHAPES

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]
TOY = Path(__file__).parents[1] / "support" / "toy_rank.py"
TENSORS = SHAPES | {"tied": SHAPES["embed"]}
SECONDS = 120.0
LOOKS = 8
RATE = 400_000
WEIGHTS_BYTES = sum(4 * math.prod(shape) for shape in SHAPES.values())
NOTICED_SECONDS = 25.0
"""A cut link is noticed by silence: the lease's 5 s, and what a busy machine adds."""


class Fleet:
    """Coordinator, two engines and a trainer that pushes once a second, each on a host of its own."""

    def __init__(self, directory: Path, on: dict[str, Host], stack: ExitStack) -> None:
        self.on = on
        self._directory = directory
        self._stack = stack
        self._observers: dict[str, subprocess.Popen[bytes]] = {}
        self.address = f"{on['coordinator'].address}:7070"

    def start(self, **of_engine_b: str) -> None:
        """`of_engine_b`: settings that go over its own."""
        self.daemon(
            "coordinator",
            *("coordinator", "--set", f"listen={self.address}", "--set", "state_dir=coordinator"),
            *("--set", "transport=inline", "--set", "lease_ttl_seconds=5", "--set", f"run_id={RUN}"),
        )
        self._engine("engine-a", {})
        self._engine("engine-b", of_engine_b)
        eventually_blocking(lambda: len(self.engines()) == 2, within=SECONDS)
        self.trainer = self.start_trainer("trainer")
        self.settles()

    def start_trainer(self, host: str) -> subprocess.Popen[bytes]:
        script = json.dumps({"steps": 100_000, "pause_before_step": 0.5, "push_timeout": 30})
        return self.daemon(
            host,
            *("trainer", "--set", f"coordinator={self.address}", "--set", "checkpoint_root=checkpoints"),
            *("--set", f"trainer_id={host}", "--set", f"state_dir={host}"),
            *("--set", f"listen={self.on[host].address}:7272", "--", str(TOY), script),
        )

    def daemon(self, host: str, command: str, *words: str) -> subprocess.Popen[bytes]:
        log = self._stack.enter_context(self.log(host, command).open("w"))
        own = [sys.executable, "-m", "controlplane.cli.main", command, "--set", "insecure=true"]
        return self._run(host, [*own, "--die-with-parent", str(os.getpid()), *words], log)

    def log(self, host: str, command: str) -> Path:
        return self._directory / f"{host}-{command}.log"

    def link(self, host: str, listen: str, target: str, latency: float, bytes_per_second: float) -> None:
        words = ["-m", "tests.support.slow_link", listen, target, str(latency), str(bytes_per_second)]
        self._run(host, [sys.executable, *words], subprocess.DEVNULL)

    def _run(self, host: str, command: list[str], log: Any, **streams: int) -> subprocess.Popen[bytes]:
        to: dict[str, Any] = {"stdout": log, "stderr": log} | streams
        environment = os.environ | PATHS
        process = subprocess.Popen(self.on[host].inside(*command), cwd=self._directory, env=environment, **to)
        self._stack.callback(_end, process)
        return process

    def _engine(self, name: str, settings: dict[str, str]) -> None:
        shapes = ", ".join(f'"{n}" = {list(shape)}' for n, shape in TENSORS.items())
        listen = f"{self.on[name].address}:7171"
        values = {"engine_id": name, "coordinator": self.address, "listen": listen, "state_dir": "engines"}
        values |= {"backend": "memory", "memory.tensors": f"{{ {shapes} }}", "memory.vocab_size": str(VOCABULARY)}
        values |= {"run_id": RUN, "checkpoint_root": "checkpoints", "stream_idle_seconds": "5"} | settings
        self.daemon(name, "engine", *(word for item in values.items() for word in ("--set", "=".join(item))))
        self._observe(name, listen)

    def _observe(self, name: str, address: str) -> None:
        log = self._stack.enter_context((self._directory / f"{name}-observer.log").open("w"))
        words = ["-m", "tests.support.host_observer", name, address, str(self.log("coordinator", "coordinator"))]
        self._observers[name] = self._run(name, [sys.executable, *words], log, stdin=PIPE, stdout=PIPE)

    def told_the_truth(self) -> None:
        """All the time, in all that was seen of both engines."""
        for name, observer in self._observers.items():
            seen = json.loads(observer.communicate(b"", timeout=SECONDS)[0])
            assert seen["wrong"] == []
            assert seen["samples"] > LOOKS, (name, seen)
            assert len(seen["claimed"]) > 1, (name, seen)

    # ---- what the coordinator says ----

    def _asked(self, command: str) -> dict[str, Any]:
        own = [sys.executable, "-m", "controlplane.cli.main", command, "--json", "--coordinator", self.address]
        asks = self.on["coordinator"].inside(*own)
        said = subprocess.run(asks, capture_output=True, text=True, timeout=90, check=False).stdout
        return dict(json.loads(said)) if said else {}

    def engines(self) -> dict[str, dict[str, Any]]:
        return {e["engine"]: e for e in self._asked("engines").get("engines", ())}

    def lease_has_lapsed(self) -> bool:
        """The only trainer's."""
        trainers = self._asked("status").get("trainers", [])
        ends = [datetime.fromisoformat(trainer["lease_expire_time"]).timestamp() for trainer in trainers]
        return len(ends) == 1 and ends[0] < time.time()

    def terms(self) -> set[str]:
        """Of what the engines hold."""
        return {engine["applied"].partition(".")[0] for engine in self.engines().values()}

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
    with hosts("coordinator", "engine-a", "engine-b", "trainer", "successor") as made, ExitStack() as stack:
        fleet = Fleet(directory, {host.name: host for host in made}, stack)
        yield fleet
        fleet.told_the_truth()


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


def test_inv7_a_trainer_that_is_cut_off_for_longer_than_its_lease_pushes_on_under_its_term(tmp_path: Path) -> None:
    """Expiry alone fences nobody."""
    with fleet_of_hosts(tmp_path) as fleet:
        fleet.start()
        held = cut_the_trainer_off(fleet)
        fleet.on["trainer"].plug_in()
        for engine in ("engine-a", "engine-b"):
            fleet.is_past(engine, held)
        assert fleet.terms() == {"1"}
        assert fleet.trainer.poll() is None


def test_inv7_a_trainer_that_is_cut_off_and_followed_ends_fenced_when_it_is_back(tmp_path: Path) -> None:
    with fleet_of_hosts(tmp_path) as fleet:
        fleet.start()
        held = cut_the_trainer_off(fleet)
        fleet.start_trainer("successor")
        for engine in ("engine-a", "engine-b"):
            fleet.is_past(engine, held)
        assert fleet.terms() == {"2"}
        fleet.on["trainer"].plug_in()
        assert fleet.trainer.wait(2 * SECONDS) == ExitCode.FENCED
        fleet.settles()
        assert fleet.terms() == {"2"}


def cut_the_trainer_off(fleet: Fleet) -> int:
    """Until its lease has lapsed: what was on its way is decided, and both engines serve on what they hold. The
    highest number that they had."""
    fleet.on["trainer"].unplug()
    eventually_blocking(fleet.lease_has_lapsed, within=SECONDS)
    eventually_blocking(lambda: fleet.number("engine-a") == fleet.number("engine-b") > 0, within=SECONDS)
    held = fleet.number("engine-a")
    assert [fleet.number(engine) for engine in ("engine-a", "engine-b")] == [held, held], "somebody pushes"
    return held


def test_an_engine_behind_a_slow_link_keeps_up(tmp_path: Path) -> None:
    """200 ms each way and 400 kB/s: to the coordinator, and from whoever sends it weights."""
    with fleet_of_hosts(tmp_path) as fleet:
        host = fleet.on["engine-b"].address
        coordinator, advertise = f"{host}:7070", f"{host}:7272"
        fleet.link("engine-b", coordinator, fleet.address, latency=0.2, bytes_per_second=RATE)
        fleet.link("engine-b", advertise, f"{host}:7171", latency=0.2, bytes_per_second=RATE)
        fleet.start(coordinator=coordinator, advertise=advertise)
        fleet.settles()
        pushed = [line for line in LogTail(fleet.log("trainer", "trainer")).fresh() if line.get("event") == "pushed"]
        both = [
            line["seconds"] for line in pushed if line["outcomes"] == {"engine-a": "APPLIED", "engine-b": "APPLIED"}
        ]
        assert both, pushed
        assert min(both) > WEIGHTS_BYTES / RATE, "the weights went another way"
