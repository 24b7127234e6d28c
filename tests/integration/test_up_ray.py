"""`weightplane up --ray` over a cluster of several nodes: one history of a fleet, whose nodes die under it.

The nodes are Ray's own on this machine, each at a loopback address of its own; daemons, ranks and checkpoints are real.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from controlplane.cli.up.on_ray import NODE_DIGITS
from controlplane.exit_codes import ExitCode
from tests.support.eventually import eventually_blocking
from tests.support.ports import free_port
from tests.support.ray_cluster import Nodes, ray_nodes
from tests.support.toy_rank import SHAPES
from weightplane import BlockingRolloutClient, SamplingSettings
from weightplane.v1 import operator_pb2, operator_pb2_grpc

WHY_NOT = "" if importlib.util.find_spec("ray") else "ray is not installed: pip install 'weightplane[ray]'"
pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(480),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]
SECONDS = 90.0
ROOM = {"cpus": 2, "gpus": 2}
"""Of a node: an engine and its trainer fill it. The GPUs are names that Ray gives out; nobody computes on them."""
TENSORS = SHAPES | {"tied": SHAPES["embed"]}
FLEET = """
run_id = "on-ray"
address = "ADDRESS"
checkpoint_root = "checkpoints"
[coordinator]
lease_ttl_seconds = 4.0
heartbeat_seconds = 0.2
[engine]
backend = "memory"
memory.tensors = { SHAPES }
[trainer]
checkpoint_keep = 3
[[groups]]
name = "p"
count = 2
tensor_parallel_size = 2
[[trainers]]
name = "policy"
script = "train.py"
arguments = ['{"steps": 100000, "pause_before_step": 0.5}']
beside = ["p-0"]
"""
TRAIN = """
import os
from pathlib import Path
from tests.support.toy_rank import main
if "CUDA_VISIBLE_DEVICES" in os.environ:
    Path(__file__).with_name("devices.txt").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
main()
"""
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Fleet:
    """A running `up`, and what can be seen of it."""

    nodes: Nodes
    directory: Path
    address: str
    up: subprocess.Popen[str]

    @property
    def said(self) -> str:
        return (self.directory / "said.txt").read_text()

    def lives(self, name: str) -> list[tuple[int, str]]:
        """Process id and node (its first digits) of each life that was started."""
        found = re.findall(rf"^{name}: started, pid (\d+) at \S+ on node (\w+)", self.said, re.MULTILINE)
        return [(int(pid), node) for pid, node in found]

    def node_of(self, name: str) -> str:
        return self.lives(name)[-1][1]

    def full_id(self, node: str) -> str:
        return next(name for name in self.nodes.names if name.startswith(node))

    def view(self) -> dict[str, Any]:
        """The coordinator's own answer; empty while it gives none."""
        words = [sys.executable, "-m", "controlplane.cli.main", "status", "--json", "--coordinator", self.address]
        shown = subprocess.run(words, capture_output=True, text=True, timeout=30, check=False)
        return json.loads(shown.stdout) if shown.returncode == 0 else {}

    def wait(self, what: str, check: Any) -> None:
        """Until it holds; what `up` said is shown if it does not."""
        try:
            eventually_blocking(check, within=SECONDS)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}\n{self.said}\n{json.dumps(self.view())[:3000]}") from error


@contextmanager
def running(nodes: Nodes, directory: Path) -> Iterator[Fleet]:
    address = f"127.0.0.1:{free_port()}"
    shapes = ", ".join(f'"{name}" = {list(shape)}' for name, shape in TENSORS.items())
    file = directory / "fleet.toml"
    file.write_text(FLEET.replace("ADDRESS", address).replace("SHAPES", shapes))
    (directory / "train.py").write_text(TRAIN)
    environment = os.environ | {"RAY_ADDRESS": nodes.address, "PYTHONPATH": str(REPOSITORY)}
    with (directory / "said.txt").open("w") as said:
        up = subprocess.Popen(
            [sys.executable, "-m", "controlplane.cli.main", "up", "--ray", str(file)],
            stderr=said,
            text=True,
            start_new_session=True,
            cwd=REPOSITORY,
            env=environment,
        )
    try:
        yield Fleet(nodes, directory, address, up)
    finally:
        if up.poll() is None:
            os.killpg(up.pid, signal.SIGKILL)
        up.wait()


class Watch:
    """What the coordinator says of each engine, ten times a second, in a thread of its own."""

    def __init__(self, address: str) -> None:
        self.seen: list[Sight] = []
        self._channel = grpc.insecure_channel(address)
        self._stub: Any = operator_pb2_grpc.OperatorStub(self._channel)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(10)
        self._channel.close()

    def last(self, engine_id: str) -> Sight:
        """Raises AssertionError: never seen."""
        seen = [sight for sight in self.seen[-100:] if sight.engine_id == engine_id]
        assert seen, f"{engine_id} was not seen"
        return seen[-1]

    def serves(self, engine_id: str, at_least: int, *, but: str = "") -> bool:
        """In another life than `but`."""
        sight = self.last(engine_id)
        return sight.routable and sight.applied >= at_least and sight.incarnation != but

    def life_of(self, engine_id: str, incarnation: str) -> list[Sight]:
        return [s for s in self.seen if (s.engine_id, s.incarnation) == (engine_id, incarnation)]

    def _look(self) -> None:
        while not self._over.wait(0.1):
            with contextlib.suppress(grpc.RpcError):
                fleet = self._stub.GetFleet(operator_pb2.GetFleetRequest(), timeout=5).fleet
                served = {v.number for model in fleet.state.models for v in model.served}
                self.seen += [Sight.of(engine, served) for engine in fleet.engines]


@dataclass(frozen=True)
class Sight:
    """One look at one engine."""

    engine_id: str
    incarnation: str
    endpoint: str
    routable: bool
    applied: int
    """0: nothing."""
    served: frozenset[int]

    @classmethod
    def of(cls, view: operator_pb2.EngineView, served: set[int]) -> Sight:
        status = view.status
        ref, number = status.engine, status.applied.number
        return cls(ref.engine_id, ref.incarnation, view.endpoint, view.routable, number, frozenset(served))


def test_inv10_a_fleet_on_ray_outlives_its_nodes_and_a_fenced_trainer_stays_down(tmp_path: Path) -> None:
    with ray_nodes() as nodes:
        first = {nodes.add(**ROOM), nodes.add(**ROOM)}
        with running(nodes, tmp_path) as fleet, Watch(fleet.address) as watch:
            fleet.wait("all serve", lambda: watch.serves("p-0", 2) and watch.serves("p-1", 2))
            it_is_placed_as_the_file_says(fleet, watch, first)
            an_engine_whose_node_dies_comes_back_on_another_and_is_caught_up_first(fleet, watch)
            a_slot_whose_node_dies_moves_as_a_whole_and_pushes_on(fleet, watch)
            a_fenced_trainer_is_not_started_again(fleet, watch)
            it_ends_in_order_and_leaves_nothing(fleet)


def it_is_placed_as_the_file_says(fleet: Fleet, watch: Watch, nodes: set[str]) -> None:
    """An engine and the ranks on its devices on one node; the ranks see the devices that Ray gave to the engine."""
    assert fleet.node_of("p-0") == fleet.node_of("policy") != fleet.node_of("p-1")
    assert {fleet.node_of("p-0"), fleet.node_of("p-1")} == {node[:NODE_DIGITS] for node in nodes}
    assert (fleet.directory / "devices.txt").read_text() == "0,1"
    hosts = {watch.last(engine).endpoint.rpartition(":")[0] for engine in ("p-0", "p-1")}
    assert hosts == {"127.0.0.2", "127.0.0.3"}
    with BlockingRolloutClient(fleet.address) as rollouts:
        sample = rollouts.generate([1, 2, 3], SamplingSettings(max_tokens=4))
    assert len(sample.tokens) == 4
    assert all(span.version.number >= 2 for span in sample.spans)


def an_engine_whose_node_dies_comes_back_on_another_and_is_caught_up_first(fleet: Fleet, watch: Watch) -> None:
    before = watch.last("p-1")
    other = fleet.nodes.add(**ROOM)
    fleet.nodes.kill(fleet.full_id(fleet.node_of("p-1")))
    (fleet.directory / "weightplane-state/engines/p-1.json").unlink()  # it was on the dead node's own disk
    fleet.wait("p-1 serves again", lambda: watch.serves("p-1", before.applied + 1, but=before.incarnation))
    assert re.search(r"^p-1: lost with its node .*; again in 1 s$", fleet.said, re.MULTILINE)
    assert fleet.node_of("p-1") == other[:NODE_DIGITS]
    life = watch.life_of("p-1", watch.last("p-1").incarnation)
    assert not life[0].routable, "it was routable before it was caught up"
    assert not [s for s in life if s.routable and s.applied not in s.served]
    assert len(fleet.lives("p-0")) == len(fleet.lives("policy")) == 1


def a_slot_whose_node_dies_moves_as_a_whole_and_pushes_on(fleet: Fleet, watch: Watch) -> None:
    before = watch.last("p-0")
    other = fleet.nodes.add(**ROOM)
    fleet.nodes.kill(fleet.full_id(fleet.node_of("p-0")))
    fleet.wait("p-0 serves again", lambda: watch.serves("p-0", before.applied + 1, but=before.incarnation))
    moved = watch.last("p-0").applied
    fleet.wait("the trainer pushes", lambda: watch.serves("p-0", moved + 2) and watch.serves("p-1", moved + 2))
    assert fleet.node_of("p-0") == fleet.node_of("policy") == other[:NODE_DIGITS]
    assert not [s for s in watch.seen if s.routable and s.applied not in s.served]


def a_fenced_trainer_is_not_started_again(fleet: Fleet, watch: Watch) -> None:
    """INV-7: another trainer takes over, and the one on the cluster ends with 66."""
    lives = len(fleet.lives("policy"))
    words = ["--fleet", str(fleet.directory / "fleet.toml"), "--id", "policy", "--set", "trainer_id=other"]
    words += ["--set", "takeover=true", "--set", f"state_dir={fleet.directory / 'other'}"]
    command = [sys.executable, "-m", "controlplane.cli.main", "trainer", *words]
    with (fleet.directory / "other.log").open("wb") as log:
        other = subprocess.Popen(
            command, stdout=log, stderr=log, start_new_session=True, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}
        )
    try:
        fleet.wait("it stays down", lambda: "policy: not started again: a restart would not help" in fleet.said)
        assert f"policy ended with code {ExitCode.FENCED:d}" in fleet.said
        applied = watch.last("p-0").applied
        fleet.wait("the other one pushes", lambda: watch.serves("p-0", applied + 2))
        assert len(fleet.lives("policy")) == lives
    finally:
        other.terminate()
        other.wait(60)


def it_ends_in_order_and_leaves_nothing(fleet: Fleet) -> None:
    pids = [pid for name in ("p-0", "p-1", "policy") for pid, _ in fleet.lives(name)]
    fleet.up.send_signal(signal.SIGTERM)
    assert fleet.up.wait(SECONDS) == ExitCode.INTERRUPTED
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    logs = {path.name for path in (fleet.directory / "weightplane-state/logs").iterdir()}
    assert logs == {"coordinator.log", "p-0.log", "p-1.log", "policy.log"}


def test_without_a_cluster_nothing_is_started(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(f'address = "127.0.0.1:{free_port()}"\n[engine]\nbackend = "memory"\n[[groups]]\nname = "p"\n')
    ended = subprocess.run(
        [sys.executable, "-m", "controlplane.cli.main", "up", "--ray", str(file)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=os.environ | {"RAY_ADDRESS": f"127.0.0.1:{free_port()}"},
    )
    assert ended.returncode == ExitCode.UNREACHABLE, ended.stderr
    assert "no Ray cluster answers at RAY_ADDRESS" in ended.stderr
    assert "started" not in ended.stderr
