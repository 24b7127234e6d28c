"""An engine over two nodes with real vLLM: its agent in one network namespace, its member in another."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from structlog.testing import capture_logs

from controlplane.exit_codes import ExitCode
from controlplane.rpc.channels import open_channel
from engine_agent.daemon.agent import run_engine
from engine_agent.daemon.settings import EngineSettings
from engine_agent.vllm import further_nodes
from tests.support.engine_of_nodes import MARK, PROMPT, TOKENS, UPDATES
from tests.support.eventually import eventually
from tests.support.ports import free_port
from tests.support.reference import Reference
from tests.support.tiny_engine import tiny_settings, trained
from tests.support.tiny_model import make_tiny_model
from weightplane.local.v1 import member_pb2, member_pb2_grpc

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.timeout(700),
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="network namespaces need root and ip"),
]

HEAD, MEMBER = "10.213.7.1", "10.213.7.2"
PORT = 7171


@pytest.fixture
def nodes() -> Iterator[tuple[str, str]]:
    """Two namespaces with a cable between them."""
    tag = uuid.uuid4().hex[:6]
    names = (f"wp-{tag}-a", f"wp-{tag}-b")
    ends = (f"wp{tag}a", f"wp{tag}b")
    for name in names:
        ip("netns", "add", name)
    ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
    for name, end, address in zip(names, ends, (HEAD, MEMBER), strict=True):
        ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
        for link in ("lo", end):
            ip("-n", name, "link", "set", link, "up")
    yield names
    for name in names:
        ip("netns", "del", name)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, timeout=10, capture_output=True)


@asynccontextmanager
async def on_node(node: str, *module: str) -> AsyncIterator[asyncio.subprocess.Process]:
    command = ["ip", "netns", "exec", node, sys.executable, "-m", *module]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def said(process: asyncio.subprocess.Process) -> dict[str, Any]:
    """The head's next word."""
    assert process.stdout is not None
    while True:
        line = await asyncio.wait_for(process.stdout.readline(), 150)
        assert line, "the head ended"
        if line.startswith(MARK.encode()):
            word: dict[str, Any] = json.loads(line.removeprefix(MARK.encode()))
            return word


async def test_cores_of_both_nodes_take_three_updates_and_a_killed_member_ends_the_engines_life(
    tmp_path: Path, nodes: tuple[str, str]
) -> None:
    from safetensors.torch import load_file

    model = make_tiny_model(tmp_path / "model", seed=0)
    state, reference = load_file(model / "model.safetensors"), Reference(model)
    where = f"{HEAD}:{PORT}"
    member_of = ("controlplane.cli.main", "engine", "--member-of", "engine-0", "--head", where)
    async with (
        on_node(nodes[0], "tests.support.engine_of_nodes", str(model), where, HEAD) as head,
        on_node(nodes[1], *member_of, "--set", f"address={MEMBER}") as member,
    ):
        assert await said(head) == {"world_size": 2, "local_pids": 2}
        for seed in UPDATES:
            greedy = reference.greedy(trained(state, seed), PROMPT, TOKENS)[0]
            cores = [[greedy, [[str(seed), 0, TOKENS]]]] * 2
            assert await said(head) == {"update": seed, "cores": cores}
        family = psutil.Process(member.pid).children(recursive=True)
        assert len(family) >= 3  # vLLM without a front end, a core, a worker
        member.kill()
        assert "its member" in (await said(head))["died"]
        await eventually(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in family))
        assert await asyncio.wait_for(head.wait(), 60) == 0


async def launches(channel: grpc.aio.Channel, told: list[member_pb2.Launch]) -> None:
    """A member that starts nothing: what it is told to start, life after life."""
    while True:
        call: Any = member_pb2_grpc.EngineMembersStub(channel).Attach(wait_for_ready=True)
        await call.write(member_pb2.AttachRequest(hello=member_pb2.MemberHello(run_id="default", engine_id="engine-0")))
        while (frame := await call.read()) is not grpc.aio.EOF:
            told += [frame.launch] if frame.HasField("launch") else []


async def test_L6_a_port_that_was_taken_before_vllm_bound_it_ends_the_start_and_the_next_attempt_has_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM wants its number beforehand: between the choice and its bind anybody may take it."""
    free, told, stop = further_nodes._free_port, list[member_pb2.Launch](), asyncio.Event()
    vllm = tiny_settings(
        make_tiny_model(tmp_path / "model", seed=0),
        data_parallel_size=2,
        further_nodes=1,
        node_address="127.0.0.1",
        start_idle_seconds=400.0,
    )
    settings = EngineSettings("engine-0", listen=f"127.0.0.1:{free_port()}", state_dir=tmp_path, vllm=vllm)
    with socket.create_server(("127.0.0.1", 0)) as taken, capture_logs() as logs:
        number = taken.getsockname()[1]
        monkeypatch.setattr(further_nodes, "_free_port", lambda where: free(where) if told else number)
        channel = open_channel(settings.listen)
        member = asyncio.create_task(launches(channel, told))
        agent = asyncio.create_task(run_engine(settings, stop))
        await eventually(lambda: len(told) == 2, within=400)
        stop.set()
        assert await asyncio.wait_for(agent, 200) == ExitCode.OK
        member.cancel()
        await channel.close()
    assert told[0].port == number != told[1].port
    (failed,) = [line["cause"] for line in logs if line["event"] == "engine_start_failed"]
    assert "Address already in use" in failed
