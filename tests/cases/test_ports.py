"""S1–S4: what people met at open ports: pickles, strangers, proxies, and addresses cut at a colon."""

from __future__ import annotations

import ast
import asyncio
import pickle
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

from controlplane import sockets
from controlplane.config import ConfigError, load
from controlplane.coordinator.daemon import CoordinatorSettings, run_coordinator
from controlplane.core import errors as e
from controlplane.core.sampling import SamplingSettings
from controlplane.exit_codes import ExitCode
from controlplane.rollout.client import RolloutClient
from controlplane.rpc.addresses import is_loopback
from controlplane.rpc.metrics import serve_metrics
from controlplane.rpc.server import start_server
from engine_agent.daemon.settings import EngineSettings
from tests.support.certificates import people
from tests.support.every_rpc import every_rpc, served
from tests.support.local_fleet import RUN, LocalFleet, local_fleet
from tests.support.ports import free_port
from tests.support.writer import Weights
from trainer_agent.agent.settings import TrainerSettings
from weightplane.v1 import fleet_pb2

PRODUCT = ("controlplane", "engine_agent", "trainer_agent", "examples")
ROOT = Path(__file__).parents[2]
RUNS_CODE = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "jsonpickle"}
CALLS = {"eval", "exec", "compile"}
UNPICKLES = re.compile(r"(\w+_object|\w+_object_list)")
"""torch.distributed's collectives for objects: they load pickles out of what the group's connections bring."""
DAEMONS: list[tuple[type[Any], dict[str, str]]] = [
    (CoordinatorSettings, {}),
    (EngineSettings, {"engine_id": "e0"}),
    (TrainerSettings, {"coordinator": "127.0.0.1:1"}),
]


WRITES_ONE = "engine_agent/external/ipc.py"
"""vLLM's own server takes handles of device memory in no other form; over loopback alone."""


class _Touch:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def _sources() -> Iterator[tuple[Path, ast.AST]]:
    for package in PRODUCT:
        for file in (ROOT / package).rglob("*.py"):
            yield file, ast.parse(file.read_text())


def test_s1_no_file_of_ours_imports_what_runs_code_out_of_bytes() -> None:
    found = []
    for file, tree in _sources():
        for node in ast.walk(tree):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CALLS
            if called or {name.partition(".")[0] for name in names} & RUNS_CODE:
                found.append(str(file.relative_to(ROOT)))
    assert found == [WRITES_ONE]


def test_s1_no_rank_takes_objects_of_others_which_torch_would_unpickle() -> None:
    found = []
    for file, tree in _sources():
        for node in ast.walk(tree):
            called = node.func if isinstance(node, ast.Call) else None
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            of_torch = hasattr(torch.distributed, name) and UNPICKLES.fullmatch(name)
            loads = isinstance(called, ast.Attribute) and name == "load" and getattr(called.value, "id", "") == "torch"
            if of_torch or loads:
                found.append(f"{file.relative_to(ROOT)}: {name}")
    assert hasattr(torch.distributed, "broadcast_object_list")
    assert found == []


def test_s1_the_one_file_that_writes_pickles_reads_none() -> None:
    tree = ast.parse((ROOT / WRITES_ONE).read_text())
    used = {
        n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "cloudpickle"
    }
    assert used == {"dumps"}


async def test_s1_a_pickle_sent_to_every_rpc_is_refused_and_never_loaded(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    payload = pickle.dumps(_Touch(touched))
    async with local_fleet(tmp_path, engines=1, channelz=True) as fleet:
        endpoint = (await fleet.engine("e0")).endpoint
        for address in (fleet.address, endpoint):
            rpcs = list(every_rpc(await served(fleet.channel(address))))
            ended = await asyncio.gather(*(rpc.call(fleet.channel(address), [payload], 60) for rpc in rpcs))
            told = {rpc.path: type(error) for rpc, error in zip(rpcs, ended, strict=True)}
            assert set(told.values()) == {e.FrameInvalid}, told
        assert (await fleet.push(Weights())).phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    assert not touched.exists()
    pickle.loads(payload)  # noqa: S301 - that it would have
    assert touched.exists()


@pytest.mark.parametrize(("settings", "given"), DAEMONS)
def test_s2_every_daemon_listens_on_loopback_unless_told_otherwise(settings: type[Any], given: dict[str, str]) -> None:
    assert is_loopback(load(settings, None, given).listen.rpartition(":")[0])


@pytest.mark.parametrize(("settings", "given"), DAEMONS)
@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "10.1.2.3:7070"])
def test_s2_another_address_is_refused_without_tls_or_the_word(
    settings: type[Any], given: dict[str, str], listen: str
) -> None:
    with pytest.raises(ConfigError, match=r"other hosts reach .*weightplane certs dev"):
        load(settings, None, given | {"listen": listen})
    assert load(settings, None, given | {"listen": listen, "insecure": True}).listen == listen


def test_s2_metrics_are_no_way_around_it() -> None:
    with pytest.raises(ConfigError, match="other hosts reach"):
        load(CoordinatorSettings, None, {"metrics_listen": "0.0.0.0:9090"})


async def test_s2_a_server_refuses_to_bind_what_its_settings_forgot_to_check() -> None:
    with pytest.raises(ConfigError, match="other hosts reach"):
        await start_server("0.0.0.0:0", [])


async def test_s2_a_running_fleet_listens_nowhere_but_on_loopback(tmp_path: Path) -> None:
    before = sockets.listeners()
    async with local_fleet(tmp_path, engines=1):
        opened = sockets.listeners() - before
    assert len(opened) == 2
    assert all(is_loopback(host) for host, _ in opened)


async def test_s2_a_certificate_that_cannot_be_read_is_an_exit_code_and_nothing_listens(tmp_path: Path) -> None:
    tls = people(tmp_path)("coordinator")
    assert tls.key is not None
    tls.key.write_text("")
    settings = CoordinatorSettings("127.0.0.1:0", tmp_path / "state", tls=tls)
    assert await run_coordinator(settings) == ExitCode.CONFIG


@pytest.mark.parametrize("secured", [False, True])
async def test_s3_no_proxy_of_the_environment_carries_a_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secured: bool
) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
    made = people(tmp_path)
    fleet = LocalFleet(tmp_path, made) if secured else LocalFleet(tmp_path)
    try:
        await fleet.start_coordinator()
        fleet.start_engine("e0")
        await fleet.wait_for_engines(1)
        await fleet.take_lease()
        assert (await fleet.push(Weights())).phase == fleet_pb2.UPDATE_PHASE_COMMITTED
    finally:
        await fleet.close()


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this host has no IPv6")
@pytest.mark.parametrize("secured", [False, True])
async def test_s4_a_fleet_on_ipv6_pushes_and_generates(tmp_path: Path, secured: bool) -> None:
    made = people(tmp_path)
    fleet = LocalFleet(tmp_path, made) if secured else LocalFleet(tmp_path)
    try:
        await fleet.start_coordinator(listen="[::1]:0")
        assert fleet.address.startswith("[::1]:")
        fleet.start_engine("e0", listen="[::1]:0")
        await fleet.wait_for_engines(1)
        assert (await fleet.engine("e0")).endpoint.startswith("[::1]:")
        await fleet.take_lease()
        assert (await fleet.push(Weights())).phase == fleet_pb2.UPDATE_PHASE_COMMITTED
        tls = made("rollout/a") if secured else fleet.tls_of("")
        async with RolloutClient(fleet.address, run_id=RUN, tls=tls) as rollouts:
            assert (await rollouts.generate([1, 2], SamplingSettings(max_tokens=2))).tokens
    finally:
        await fleet.close()


async def test_s4_a_bare_ipv6_address_is_refused_and_not_cut() -> None:
    with pytest.raises(ConfigError, match="an IPv6 host stands in brackets"):
        load(CoordinatorSettings, None, {"listen": "::1:7070"})


def test_s4_metrics_answer_on_ipv6() -> None:
    port = free_port()
    serve_metrics(f"[::1]:{port}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    assert b"weightplane_refusals" in opener.open(f"http://[::1]:{port}/metrics", timeout=60).read()
