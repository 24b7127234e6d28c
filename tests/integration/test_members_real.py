"""An engine over two nodes as a fleet has it, with real vLLM: its agent, the coordinator and a trainer on one host, its
member on another. What is lost comes again, and takes the next version on every core.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.eventually import eventually_blocking
from tests.support.hosts import WHY_NOT, Host, hosts
from tests.support.reference import Reference
from tests.support.tiny_model import make_tiny_model
from tests.support.told_rank import Order, weights

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT),
]

ROOT = Path(__file__).parents[2]
PATHS = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "protos")))}
RUN, ENGINE = "nodes", "wide-0"
START_SECONDS = 500.0
"""Of one life, on a machine that does ten other things."""
PROMPT, TOKENS = [5, 6, 7, 8], 8
FLEET = """
run_id = "nodes"
address = "HEAD:7070"
[coordinator]
insecure = true
[engine]
insecure = true
listen = "HEAD:7171"
[vllm]
model = "model"
dtype = "float32"
max_model_len = 256
max_num_seqs = 8
kv_cache_memory_bytes = 33554432
start_idle_seconds = 400
[[groups]]
name = "wide"
vllm = { data_parallel_size = 2, further_nodes = 1, node_address = "HEAD" }
"""
ASK = """
import asyncio, json, sys
from weightplane import RolloutClient, SamplingSettings
async def main():
    greedy = SamplingSettings(max_tokens=int(sys.argv[3]), temperature=0.0, ignore_eos=True)
    async with RolloutClient(sys.argv[1], run_id="nodes") as rollouts:
        asked = (rollouts.generate(json.loads(sys.argv[2]), greedy) for _ in range(2))
        made = await asyncio.gather(*asked)
    print(json.dumps([[list(m.tokens), [[s.version.number, s.start, s.end] for s in m.spans]] for m in made]))
asyncio.run(main())
"""


class Nodes:
    """The fleet's processes, each on its host."""

    def __init__(self, directory: Path, head: Host, other: Host, stack: ExitStack) -> None:
        self.head, self.other, self.address = head, other, f"{head.address}:7070"
        self.model = make_tiny_model(directory / "model", seed=0)
        self._reference = Reference(self.model)
        self._directory, self._stack = directory, stack
        (directory / "fleet.toml").write_text(FLEET.replace("HEAD", head.address))
        self._daemon(head, "coordinator", "coordinator")
        self._daemon(head, "engine", "engine", "--id", ENGINE)
        command = [sys.executable, "-m", "tests.support.told_rank", str(self.model)]
        where = {"WEIGHTPLANE_COORDINATOR": self.address, "WEIGHTPLANE_RUN_ID": RUN}
        self._rank = self._run(head, command, "rank", where, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def start_member(self) -> subprocess.Popen[bytes]:
        of = ("--member-of", ENGINE, "--head", f"{self.head.address}:7171", "--set", f"address={self.other.address}")
        return self._daemon(self.other, "member", "engine", *of)

    def _daemon(self, host: Host, log: str, command: str, *words: str) -> subprocess.Popen[bytes]:
        own = [sys.executable, "-m", "controlplane.cli.main", command, "--fleet", "fleet.toml"]
        return self._run(host, [*own, "--die-with-parent", str(os.getpid()), *words], log, {})

    def _run(
        self, host: Host, command: list[str], log: str, environment: dict[str, str], **pipes: int
    ) -> subprocess.Popen[bytes]:
        output = self._stack.enter_context((self._directory / f"{log}.log").open("a"))
        where: dict[str, Any] = {"stdout": output, "stderr": output} | pipes
        process: subprocess.Popen[bytes] = subprocess.Popen(
            host.inside(*command), cwd=self._directory, env=os.environ | PATHS | environment, **where
        )
        self._stack.callback(_end, process)
        return process

    def _said(self, *words: str) -> str:
        """By a Python on the engine's host; nothing if it failed."""
        command = self.head.inside(sys.executable, *words)
        ended = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False, env=os.environ | PATHS
        )
        return ended.stdout

    # ---- what is asked of it ----

    def engine(self) -> dict[str, Any]:
        """As the coordinator shows it; empty: it knows none that is there."""
        said = self._said("-m", "controlplane.cli.main", "engines", "--json", "--coordinator", self.address)
        found: list[dict[str, Any]] = [e for e in json.loads(said)["engines"] if e["known"]] if said else []
        return found[0] if found else {}

    def life_after(self, incarnation: str) -> str:
        """Wait for the engine's next life, which holds nothing."""
        found: dict[str, Any] = {}

        def came() -> bool:
            found.update(self.engine())
            return bool(found.get("incarnation", incarnation) != incarnation and found["state"] == "empty")

        eventually_blocking(came, within=START_SECONDS)
        assert found["applied"] is None
        return str(found["incarnation"])

    def takes(self, seed: int) -> None:
        """A pushed version, which both cores then say: two requests at once go to two cores."""
        assert self._rank.stdin is not None
        assert self._rank.stdout is not None
        self._rank.stdin.write(json.dumps({"seed": seed}).encode() + b"\n")
        self._rank.stdin.flush()
        end: dict[str, Any] = {"event": "listening"}
        while end["event"] not in ("pushed", "failed"):
            line = self._rank.stdout.readline()
            assert line, "the rank ended"
            end = json.loads(line) if line.startswith(b"{") else end
        assert end["event"] == "pushed", end
        said = self._said("-c", ASK, self.address, json.dumps(PROMPT), str(TOKENS))
        greedy = self._reference.greedy(weights(self.model, Order(seed)), PROMPT, TOKENS)[0]
        assert json.loads(said.splitlines()[-1]) == [[greedy, [[end["number"], 0, TOKENS]]]] * 2


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    with hosts("head", "other") as (head, other), ExitStack() as stack:
        yield Nodes(tmp_path, head, other, stack)


def test_an_engine_and_its_member_come_again_whichever_was_lost_and_take_the_next_version(nodes: Nodes) -> None:
    member = nodes.start_member()
    first = nodes.life_after("")
    nodes.takes(1)
    cores = psutil.Process(member.pid).children(recursive=True)
    member.kill()
    member.wait()
    eventually_blocking(lambda: not any(_runs(p) for p in cores), within=60)  # its cores do not outlive it
    member = nodes.start_member()  # as whatever supervises it would
    second = nodes.life_after(first)
    nodes.takes(2)
    (headless,) = psutil.Process(member.pid).children()
    headless.kill()
    third = nodes.life_after(second)
    assert member.poll() is None, "a member whose cores are lost comes again by itself"
    nodes.takes(3)
    assert len({first, second, third}) == 3


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
